"""The benchmarks of search programs: what is recorded, in which order it is sent again, and what programs take."""

import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tiny import EOS, idle, tiny_llm

from treewise import BeamSearchParams, SamplingParams, call, gather, generate, score
from treewise.awaitables import decode
from treewise.controller import BeamSearch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import program_overhead
import search_against_vllm as bench
from recorded_search import Call, Operation, recorded

SMALL = {
    "best_of_n": {"n": 4, "max_tokens": 6},
    "tot": {"depth": 2, "width": 3, "beam": 2, "thought_tokens": 5, "answer_tokens": 4},
    "mcts": {"iterations": 6, "parallel": 2, "depth": 4, "width": 2, "thought_tokens": 3, "answer_tokens": 2},
}
PROMPT = [7, 1, 9]


def fixed(tokens):
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_what_a_program_asks_for_is_recorded_in_order():
    paths = {}

    async def one(branch, tokens):
        await generate([branch], fixed(tokens))
        paths[tokens] = branch.path_tokens
        branch.append([4, 5])
        await generate([branch], fixed(2))
        branch.prune()

    async def program(root):
        first, second, third = root.fork(3)
        await generate([], fixed(1))
        await gather(one(first, 3), one(second, 12))
        return await score([third], [8, 8], ["a", "b", "cd"])

    llm = tiny_llm(looks_ahead=True)
    [result], seconds, operations = recorded(llm, lambda: llm.run(program, [PROMPT], seed=0))
    idle(llm)
    assert seconds > 0 and len(result.value[0]) == 3
    short, long, after_short, after_long, asked = operations
    assert short.calls == [Call(tuple(PROMPT), 3)] and long.calls == [Call(tuple(PROMPT), 12)]
    assert after_short.calls == [Call((*paths[3], 4, 5), 2)] and after_long.calls == [Call((*paths[12], 4, 5), 2)]
    text = (*PROMPT, 8, 8)
    assert asked.calls == [Call(text, 0), Call((*text, ord("c")), 0)]  # "a" and "b" are read off one forward
    assert short.start < long.start < short.end < after_short.start < after_short.end < long.end < after_long.start
    assert after_long.end < asked.start < asked.end


def test_tokens_that_came_are_what_is_asked_for_again():
    async def program(root):
        return await generate(root.fork(8), SamplingParams(temperature=2.0, max_tokens=40))

    llm = tiny_llm()
    [result], _, [operation] = recorded(llm, lambda: llm.run(program, [PROMPT], seed=3))
    assert [len(branch.tokens) for branch in result.value] == [call.tokens for call in operation.calls]
    assert any(branch.tokens[-1] == EOS for branch in result.value)


def test_branches_that_a_controller_forks_are_no_requests():
    llm = tiny_llm()
    with pytest.raises(ValueError, match="controller: what BeamSearch forks are no requests"):
        recorded(llm, lambda: llm.run(lambda root: beams(root), [PROMPT]))
    assert "_start" not in vars(llm.engine) and "_answer_those_over" not in vars(llm.engine)


async def beams(root):
    return await decode([root.fork()[0]], BeamSearch(BeamSearchParams(3, max_tokens=5)))


class SlowPeer:
    """Ends a request after as many steps as it has tokens, and checks what it is sent."""

    def __init__(self, operations):
        self.operations = operations
        self.left = {}
        self.sent = []
        self.ended = Counter()
        self.calls = {id(call): operation for operation in operations for call in operation.calls}

    def over(self, operation):
        return self.ended[operation.end] == len(operation.calls)

    def submit(self, number, call):
        operation = self.calls[id(call)]
        assert all(self.over(other) for other in self.operations if other.end < operation.start)
        assert number not in self.left and number == len(self.sent)
        self.left[number] = max(call.tokens, 1)
        self.sent.append(call)

    def step(self):
        for operation in self.operations:
            if all(self.over(other) for other in self.operations if other.end < operation.start):
                assert all(any(call is one for one in self.sent) for call in operation.calls), "sent as soon as can be"
        self.left = {number: left - 1 for number, left in self.left.items()}
        ended = [number for number, left in self.left.items() if left == 0]
        for number in ended:
            del self.left[number]
            self.ended[self.calls[id(self.sent[number])].end] += 1
        return ended


def test_requests_are_sent_once_and_when_all_before_has_ended():
    operations = [
        Operation(0, 4, [Call([1], 2), Call([1], 9), Call([1], 2)]),
        Operation(1, 2, [Call([2], 3)]),
        Operation(3, 6, [Call([2, 2], 20), Call([2, 3], 0)]),
        Operation(5, 7, [Call([1, 1], 1)]),
        Operation(8, 9, [Call([3], 4), Call([3], 5)]),
    ]
    peer = SlowPeer(operations)
    bench.replay(peer, operations)
    assert Counter(map(id, peer.sent)) == Counter(id(call) for one in operations for call in one.calls)
    assert all(map(peer.over, operations)) and not peer.left
    assert bench.waves(operations) == [4, 3, 2]


@pytest.fixture
def recording(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "settings_of", lambda name, live: SMALL[name])
    words = ["--model", "shape:tiny", "--device", "cpu", "--prompt-tokens", "20", "33", "--repeats", "2"]
    bench.main(["record", str(tmp_path / "new"), *words])
    return json.loads((tmp_path / "new" / "recorded.json").read_text())


def test_strategies_are_recorded_with_prompts_of_their_own(recording):
    runs = recording["runs"]
    kinds = [(run["strategy"], run["prompt_tokens"]) for run in runs]
    assert kinds == [(name, length) for length in (20, 33) for name in SMALL for _ in range(3)]
    assert recording["model"] == "shape:tiny" and recording["max_num_rows"] == 8192
    for run, (name, length) in zip(runs, kinds, strict=True):
        assert run["seconds"] > 0 and run["settings"] == SMALL[name] and len(run["prompt"]) == length
        operations = bench.read(run)
        calls = [call for operation in operations for call in operation.calls]
        assert all(call.text[:length] == run["prompt"] for call in calls)
        tokens = Counter(call.tokens for call in calls)
        if name == "best_of_n":
            assert tokens == {6: 4} and bench.waves(operations) == [4]
        elif name == "tot":
            assert tokens == {5: 3 + 6, 4: 2, 0: 3 + 6 + 2} and bench.waves(operations) == [3, 3, 6, 6, 2, 2]
        else:
            assert tokens == {3: 12, 2: 1, 0: 13} and bench.waves(operations) == [2, 2, 4, 4, 4, 4, 2, 2, 1, 1]
        assert run["rows"] >= length + sum(call.tokens for call in calls) - len(calls)
    assert len({tuple(run["prompt"][:16]) for run in runs}) == 18  # or one run would find another's keys in the cache


def test_a_recording_without_a_timed_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="repeats"):
        bench.main(["record", str(tmp_path), "--model", "shape:tiny", "--device", "cpu", "--repeats", "0"])


def test_a_recording_is_sent_to_vllm(recording, tmp_path, monkeypatch, capsys):
    log = []

    class FakeLLM:
        def __init__(self, **options):
            assert options["max_model_len"] == max(
                len(call.text) + max(call.tokens, 1)
                for run in recording["runs"]
                for operation in bench.read(run)
                for call in operation.calls
            )
            assert options["enable_prefix_caching"] and options["max_num_seqs"] == 64
            self.llm_engine, self.waiting, self.names = self, [], set()

        def add_request(self, name, prompt, params):
            assert params.ignore_eos and (params.logprobs is None or params.max_tokens == 1)
            assert name not in self.names
            self.names.add(name)
            log.append((prompt["prompt_token_ids"], params.max_tokens))
            self.waiting.append((name, params.max_tokens))

        def step(self):
            (name, tokens), *self.waiting = self.waiting
            outputs = [SimpleNamespace(token_ids=[0] * tokens)]
            going_on = SimpleNamespace(finished=False, request_id="nobody's")
            return [going_on, SimpleNamespace(finished=True, request_id=name, outputs=outputs, num_cached_tokens=3)]

    package, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    package.LLM, package.SamplingParams, package.__version__ = FakeLLM, SimpleNamespace, "0.26.0"
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    bench.main(["replay", str(tmp_path / "new")])
    result = json.loads((tmp_path / "new" / "replayed.json").read_text())
    assert result["vllm"] == "0.26.0" and result["model"] == "shape:tiny"
    assert log == [
        (call.text, max(call.tokens, 1))
        for run in recording["runs"]
        for operation in bench.read(run)
        for call in operation.calls
    ]
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row | {"sent": whole["sent"]} for row, whole in zip(said, result["results"], strict=True)] == result[
        "results"
    ]
    assert len(said) == 6
    for row in result["results"]:
        assert row["ratio"] == pytest.approx(row["seconds"]["vllm"] / row["seconds"]["treewise"])
        assert len(row["sent"]) == len(row["steps"]) == 2  # the first run of each kind warms up
        for sent in row["sent"]:
            assert sent["requests"] == sum(sent["waves"]) and sent["cached_tokens"] == 3 * sent["requests"]


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", program_overhead.PROGRAMS)
def test_what_programs_take_is_told_from_steps(name, looks_ahead):
    llm = tiny_llm(looks_ahead=looks_ahead)
    row = program_overhead.measure(llm, program_overhead.PROGRAMS[name], 2, 8, 8, 0)
    idle(llm)
    assert row["most_live"] == 16 and row["rows_a_step"] > 8
    assert 0 < row["delay_ms_a_step"] <= row["program_ms_a_step"] < row["wall_ms_a_step"]
    assert row["wall_ms_a_step"] == pytest.approx(row["step_ms"] + row["delay_ms_a_step"])
    assert row["share_percent"] == pytest.approx(100 * row["delay_ms_a_step"] / row["step_ms"])
    assert "_run_programs" not in vars(llm.engine)


def test_a_function_that_is_waited_for_is_the_programs_own_time():
    llm = tiny_llm()

    async def program(root):
        await call(sleep)
        return await generate(root.fork(2), fixed(3))

    from time import sleep as really

    def sleep():
        really(0.05)

    with program_overhead.Watch(llm) as watch:
        llm.run(program, [PROMPT])
    own, delay = watch.seconds()
    assert own == pytest.approx(delay) and own > 0.04 and watch.live == [1, 2, 2]

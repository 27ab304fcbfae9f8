"""Time search programs on a GPU against vLLM, which gets the same work as a program over an API would send it.

    python benchmarks/search_against_vllm.py record DIR [--model shape:llama-3-8b] [--device cuda] [--repeats 3]
    python benchmarks/search_against_vllm.py replay DIR

`record` runs the strategies on treewise, times each run whole, and writes what they asked for, operation by operation,
to DIR/recorded.json. `replay` sends that to vLLM's offline engine, with prefix caching and CUDA graphs, and writes both
times to DIR/replayed.json. The two are processes of their own, since each takes all of the GPU's memory.

- A continuation of a branch is one request: its whole text as token ids, and as many sampled tokens as it had.
- A question about a text (is it right, Yes or No?) is one request of one token with its likeliest tokens, as an API
  gives them. (`prompt_logprobs` would keep vLLM from using its prefix cache.)
- A request is sent as soon as everything has ended that had ended on treewise when it began: samples of one round,
  thoughts of one level, and leaves of one iteration are sent at once.

What the program itself does between the requests takes no time on vLLM's side. Each run has a prompt of its own, random
token ids, so that nothing is in a cache when it begins. Shapes of models have random weights; so no text ends by
itself, and all thoughts are as long as they may be.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import count, groupby, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Protocol, cast
from zlib import crc32

from recorded_search import Call, Operation, recorded

from treewise.bench.engines import VLLM, Room
from treewise.bench.measure import describe_machine
from treewise.bench.runs import random_prompt
from treewise.bench.subject import Subject
from treewise.config import check_integer
from treewise.models import Tokenizer
from treewise.models.shapes import NumberTokenizer
from treewise.search import STRATEGIES

DRAWING = {"temperature": 1.0, "top_p": 1.0}
"""What is drawn from all tokens costs both engines the least."""
STRATEGY_NAMES = ("best_of_n", "tot", "mcts")
LIKELIEST = 5
"""Tokens whose likelihoods an answer to a question comes with."""


def settings_of(name: str, live: int) -> dict[str, Any]:
    """Return the settings of a strategy that has about so many branches under way at once."""
    thoughts = {"thought_tokens": 64, "answer_tokens": 64}
    own: dict[str, dict[str, Any]] = {
        "best_of_n": {"n": live, "max_tokens": 128},
        "tot": {"depth": 3, "width": 5, "beam": max(1, live // 6), **thoughts},
        "mcts": {"iterations": live, "parallel": max(1, live // 4), "depth": 8, "width": 3, **thoughts},
    }
    return own[name] | DRAWING


class WordTokenizer(NumberTokenizer):
    """Reads a word that is no number as one token, so that strategies can ask a model without text."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Read the words in `text`."""
        words = text.split()
        return [int(word) if word.isdecimal() else crc32(word.encode()) % self.vocab_size for word in words]


class Peer(Protocol):
    """An engine that gets requests one by one, and works on all that it has."""

    def submit(self, number: int, call: Call) -> None:
        """Take a request."""

    def step(self) -> list[int]:
        """Work on; returns the numbers of the requests that ended."""


class OverVLLM:
    """vLLM's engine, step by step.

    Attributes
    ----------
    cached_tokens : int
        Tokens of all texts that were found in the prefix cache.
    """

    def __init__(self, subject: Subject, room: Room) -> None:
        self.engine = VLLM(subject, subject.element, room).llm.llm_engine
        self.cached_tokens = 0
        self._names = count()
        self._sent: dict[str, tuple[int, int]] = {}  # number and new tokens

    def submit(self, number: int, call: Call) -> None:
        """See `Peer.submit`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name, tokens = str(next(self._names)), call.tokens or 1
        self._sent[name] = number, tokens
        params = SamplingParams(
            **DRAWING,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=None if call.tokens else LIKELIEST,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(name, {"prompt_token_ids": call.text}, params)

    def step(self) -> list[int]:
        """See `Peer.step`."""
        ended = []
        for output in self.engine.step():
            if output.finished:
                number, tokens = self._sent.pop(output.request_id)
                if len(output.outputs[0].token_ids) != tokens:
                    raise RuntimeError(f"vLLM decoded {len(output.outputs[0].token_ids)} tokens, not {tokens}")
                self.cached_tokens += output.num_cached_tokens or 0
                ended.append(number)
        return ended


class AtOnce:
    """Ends all requests in the next step.

    Attributes
    ----------
    waves : list of int
        How many requests were under way in each step.
    """

    def __init__(self) -> None:
        self.waves: list[int] = []
        self._taken: list[int] = []

    def submit(self, number: int, call: Call) -> None:
        """See `Peer.submit`."""
        self._taken.append(number)

    def step(self) -> list[int]:
        """See `Peer.step`."""
        ended, self._taken = self._taken, []
        self.waves.append(len(ended))
        return ended


def replay(peer: Peer, operations: Sequence[Operation]) -> None:
    """Send the calls of operations, which are in the order of their beginnings, when all has ended that had before."""
    ahead = deque(operations)
    under_way = {operation.end: len(operation.calls) for operation in operations}
    owners: list[int] = []  # the ends of the operations that requests are of
    while under_way:
        first = min(under_way)
        while ahead and ahead[0].start < first:
            operation = ahead.popleft()
            for call in operation.calls:
                peer.submit(len(owners), call)
                owners.append(operation.end)
        for number in peer.step():
            under_way[owners[number]] -= 1
            if not under_way[owners[number]]:
                del under_way[owners[number]]


def record(
    subject: Subject, strategies: Sequence[str], live: int, prompt_tokens: Sequence[int], repeats: int
) -> dict[str, Any]:
    """Run strategies on treewise, each once more often than told: the first run warms up."""
    model, tokenizer = subject.load()
    if subject.shape is not None:
        tokenizer = cast(Tokenizer, WordTokenizer(tokenizer.vocab_size))
    llm = subject.engine((model, tokenizer), "auto")
    runs, seeds = [], count()
    for length, name in product(prompt_tokens, strategies):
        settings = settings_of(name, live)
        program = STRATEGIES[name].build(**settings)
        for number in range(repeats + 1):
            seed = next(seeds)  # no two runs have prompts that begin alike
            prompt = random_prompt(length, tokenizer.vocab_size, seed)
            [result], seconds, operations = recorded(llm, partial(llm.run, program, [prompt], seed=seed))
            usage = result.tree.usage
            print(f"{name}, prompt of {length}, run {number}: {seconds:.3f} s, {usage.steps} steps", flush=True)
            run = {"strategy": name, "prompt_tokens": length, "settings": settings, "seconds": seconds}
            run |= {"steps": usage.steps, "rows": usage.rows, "prompt": prompt}
            runs.append(run | {"operations": [without(operation, length) for operation in operations]})
    return {**asdict(subject), "machine": describe_machine(subject.place), "runs": runs}


def without(operation: Operation, given: int) -> Operation:
    """Leave the first `given` tokens out of all texts."""
    return operation._replace(calls=[call._replace(text=call.text[given:]) for call in operation.calls])


def read(run: dict[str, Any]) -> list[Operation]:
    """Return the operations of a run, with its prompt in front of all texts."""
    return [
        Operation(start, end, [Call(run["prompt"] + text, *others) for text, *others in calls])
        for start, end, calls in run["operations"]
    ]


def compare(recording: dict[str, Any]) -> dict[str, Any]:
    """Send what was recorded to vLLM; the first run of each kind warms up."""
    subject = Subject(**{field.name: recording[field.name] for field in fields(Subject)})
    runs = [(run, read(run)) for run in recording["runs"]]
    calls = [call for _, operations in runs for operation in operations for call in operation.calls]
    widest = max(max(waves(operations)) for _, operations in runs)
    room = Room(max(64, widest), max(len(call.text) + (call.tokens or 1) for call in calls))
    peer, rows = OverVLLM(subject, room), []
    for (name, length), group in groupby(runs, lambda run: (run[0]["strategy"], run[0]["prompt_tokens"])):
        (_, warm), *alike = group
        replay(peer, warm)
        sent = []
        for run, operations in alike:
            peer.cached_tokens = 0
            start = perf_counter()
            replay(peer, operations)
            seconds = {"treewise": run["seconds"], "vllm": perf_counter() - start}
            sent.append(summary(operations) | {"cached_tokens": peer.cached_tokens, "seconds": seconds})
        middle = {side: median(one["seconds"][side] for one in sent) for side in ("treewise", "vllm")}
        rows.append(
            {
                "strategy": name,
                "prompt_tokens": length,
                "settings": alike[0][0]["settings"],
                "steps": [run["steps"] for run, _ in alike],
                "rows": [run["rows"] for run, _ in alike],
                "seconds": middle,
                "ratio": middle["vllm"] / middle["treewise"],
                "sent": sent,
            }
        )
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "sent"}), flush=True)
    from vllm import __version__

    facts = {name: value for name, value in recording.items() if name != "runs"}
    return {"bench": "search_against_vllm", "vllm": __version__, **facts, "results": rows}


def waves(operations: Sequence[Operation]) -> list[int]:
    """Return how many requests are sent at a time."""
    peer = AtOnce()
    replay(peer, operations)
    return peer.waves


def summary(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return what is sent for a run."""
    calls = [call for operation in operations for call in operation.calls]
    return {
        "requests": len(calls),
        "questions": sum(not call.tokens for call in calls),
        "waves": waves(operations),
        "text_tokens": sum(len(call.text) for call in calls),
        "new_tokens": sum(call.tokens for call in calls),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Record, or replay what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("record", help="run the strategies on treewise")
    first.add_argument("folder", type=Path)
    first.add_argument("--model", default="shape:llama-3-8b")
    first.add_argument("--device", default="cuda")
    first.add_argument("--max-num-rows", type=int, default=8192)
    first.add_argument("--prompt-tokens", type=int, nargs="+", default=[2000])
    first.add_argument("--strategies", nargs="+", choices=STRATEGY_NAMES, default=STRATEGY_NAMES)
    first.add_argument("--live", type=int, default=32, help="branches under way at once, about")
    first.add_argument("--repeats", type=int, default=3)
    second = commands.add_parser("replay", help="send the same to vLLM")
    second.add_argument("folder", type=Path)
    options = parser.parse_args(arguments)
    recording = options.folder / "recorded.json"
    if options.command == "record":
        check_integer("repeats", options.repeats, 1)
        subject = Subject(model=options.model, device=options.device, max_num_rows=options.max_num_rows)
        result = record(subject, options.strategies, options.live, options.prompt_tokens, options.repeats)
        options.folder.mkdir(parents=True, exist_ok=True)
        recording.write_text(json.dumps(result), encoding="utf-8")
    else:
        result = compare(json.loads(recording.read_text(encoding="utf-8")))
        (options.folder / "replayed.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

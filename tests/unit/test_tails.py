"""Branches that are thinned out together while they decode: what they share, what they have alone, and who waits."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from guesses import Noise, Rivals
from tiny import idle, tiny_llm, tiny_model

from treewise import BeamSearchParams, SamplingParams, generate, keep
from treewise.ops import rotate
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.policy import KVSparsity
from treewise.speculate.ngram import NgramDrafter
from treewise.speculate.speculator import Speculator
from treewise.survivors import Few, recall, remember
from treewise.thinning import Thinner

MODEL = tiny_model(windows=(None, 11, None, None), max_positions=200)
PROMPT = list(range(1, 60))
POLICY = KVSparsity.named("snapkv", budget=18, window=4, sinks=2, every=6)
POLICIES = {
    "snapkv": POLICY,
    "novita": KVSparsity.named("novita", budget=14, window=4, first_full=1, every=7),
    "pyramidkv": KVSparsity.named("pyramidkv", budget=20, window=4, sinks=1, every=9),
    "adakv": KVSparsity.named("adakv", budget=16, window=3, sinks=1, every=6),
    "keydiff": KVSparsity.named("keydiff", budget=16, window=4, every=5),
    "h2o": KVSparsity.named("h2o", budget=16, window=4, every=8),
    "share": KVSparsity("snapkv", budget=0.3, window=4, every=8),
    "joint": KVSparsity("snapkv", budget=18, window=4, sinks=2, every=6, joint=True),
}


def greedy(count):
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)


class Diary:
    """What is kept of paths whenever they are thinned out, by the tokens of the path: positions by layer and head."""

    def __init__(self, monkeypatch):
        self.kept, self.held, self.meetings = {}, {}, []
        replace = Thinner._replace

        def replaced(thinner, tree, case, parts, ends, key, trees):
            kv, config = thinner.kv, MODEL.config
            told, lines = {}, {}
            for part in parts:
                before = [
                    [[p for node in part.nodes for p in self.positions(node, layer, head)] for head in (0, 1)]
                    for layer in range(config.num_layers)
                ]
                chosen = part.chosen or recall(thinner.runner, part.stage.chosen, part.places)
                told[part.stage] = own = []
                for layer, which in enumerate(chosen):
                    rows = None if which is None else [row.tolist() for part in which for row in part]
                    own.append(
                        [
                            each if rows is None else [each[i] for i in row]
                            for each, row in zip(before[layer], rows or [None, None], strict=True)
                        ]
                    )
                above = lines.get(part.above)
                lines[part] = (
                    own
                    if above is None
                    else [
                        [one + other for one, other in zip(*both, strict=True)] for both in zip(above, own, strict=True)
                    ]
                )
                if part.nodes[-1] in ends:
                    self.kept[tuple(kv.forest.path_tokens(part.nodes[-1]))] = lines[part]
            self.meetings.append((len(ends), [part.nodes[-1].end for part in parts]))
            result = replace(thinner, tree, case, parts, ends, key, trees)
            self.held.update({node: told[stage] for node, stage in tree.stages.items() if stage in told})
            return result

        monkeypatch.setattr(Thinner, "_replace", replaced)

    def positions(self, node, layer, head):
        return self.held[node][layer][head] if node in self.held else range(node.start, node.end)

    def stages(self, tokens):
        """Return the lengths at which the path of `tokens` was thinned out, and what was kept then."""
        return sorted((len(path), kept) for path, kept in self.kept.items() if tuple(tokens[: len(path)]) == path)


@torch.inference_mode()
def seen_by(tokens, stages):
    """Return the logits of a path that was thinned out at some places, and queries, keys, values and LSE by layer."""
    config, n = MODEL.config, len(tokens)
    group, layers = config.num_heads // config.num_kv_heads, []
    bounds = [*(end for end, _ in stages), n]

    def attend(layer, heads):
        q, k, v = rotate(heads, config.num_kv_heads)
        seen = torch.ones(config.num_kv_heads, n, n, dtype=torch.bool).tril()
        if config.layer_windows[layer] is not None:
            seen &= torch.ones(n, n, dtype=torch.bool).triu(1 - config.layer_windows[layer])
        else:
            for (_, kept), begin, end in zip(stages, bounds, bounds[1:], strict=False):
                for head, own in zip(seen, kept[layer], strict=True):
                    head[begin:end, :begin] &= torch.zeros(begin, dtype=torch.bool).index_fill(
                        0, torch.tensor(own), True
                    )
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * config.attention_scale
        scores.masked_fill_(~seen.repeat_interleave(group, 0), -torch.inf)
        layers.append((q, k, v, scores.logsumexp(-1).T))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, 1))

    return MODEL.logits(MODEL(torch.tensor(tokens), torch.arange(n), attend)), layers


def check_text(path, given, stages):
    """Check the greedy tokens of a path, of which so many were given."""
    logits, _ = seen_by(path, stages)
    assert logits[given - 1 : -1].argmax(-1).tolist() == path[given:]


def checked(diary, paths):
    for path, given in paths:
        stages = diary.stages(path)
        assert len(stages) > 2, "it was thinned out again and again"
        check_text(path, given, stages)


def trio(told, count=26, seed_tokens=((30,), (31, 32, 33), (34, 35))):
    """Return a program of three branches, two of which share more than the prompt, that tells their paths."""

    async def program(root):
        left, right = root.fork(2)
        left.append(list(seed_tokens[0]))
        right.append(list(seed_tokens[2]))
        await generate([left, right], greedy(4))
        low, high = left.fork(2)
        low.append([40])
        high.append(list(seed_tokens[1]))
        begun = [branch.num_tokens for branch in (low, high, right)]
        await generate([low, high, right], greedy(count))
        told.append([(branch.path_tokens, given) for branch, given in zip((low, high, right), begun, strict=True)])

    return program


OPTIONS = [{}, {"max_num_rows": 3}, {"page_size": 1}, {"looks_ahead": True}, {"enable_prefix_caching": False}]


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_branches_read_what_was_kept_of_their_paths_whatever_the_steps(policy, monkeypatch):
    diary, told = Diary(monkeypatch), []
    for options in OPTIONS:
        llm = tiny_llm(MODEL, kv_sparsity=policy, **options)
        llm.run(trio(told), [PROMPT])
        idle(llm)
        if len(told) == 1:
            checked(diary, told[0])
    assert all(paths == told[0] for paths in told)
    assert any(number == 3 and len(parts) == 5 for number, parts in diary.meetings), "the prompt, what two share, tails"


def meetings(policy, paths, diary):
    """Yield of each meeting the paths, how much each shares with each, and of each what it held, with scores."""
    layers = range(MODEL.config.num_layers)
    for end in sorted({end for path, _ in paths for end, _ in diary.stages(path)})[1:]:
        together = [list(path) for path in dict.fromkeys(tuple(path[:end]) for path, _ in paths) if path in diary.kept]
        held, scores = [], []
        for path in together:
            *before, (base, kept) = (stage for stage in diary.stages(path) if stage[0] < end)
            _, seen = seen_by(path, [*before, (base, kept)])
            there = [[[*own, *range(base, end)] for own in kept[layer]] for layer in layers]
            held.append(there)
            scores.append([scores_of(policy, seen[layer], there[layer], end, base) for layer in layers])
        yield together, [[shared(one, other) for other in together] for one in together], held, scores


def shared(one, other):
    pairs = zip(one, other, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(one))


def scores_of(policy, layer, there, end, base):
    q, k, v, lse = layer
    first, group = end - min(policy.num_queries, end - base), MODEL.config.num_heads // MODEL.config.num_kv_heads
    found = []
    for head, own in enumerate(there):
        heads = slice(head * group, (head + 1) * group)
        evidence = Evidence(
            *(0, 1, k[own][:, head : head + 1], v[own][:, head : head + 1], torch.tensor(own)),
            *(q[first:end, heads], torch.arange(first, end), lse[first:end, heads]),
            *(MODEL.config.attention_scale, None, MODEL.config.layer_ropes[0]),
        )
        found.append(policy.scores(evidence, len(own))[0].numpy())
    return found


def test_what_is_kept_is_what_numpy_keeps(monkeypatch):
    diary, told = Diary(monkeypatch), []
    llm = tiny_llm(MODEL, kv_sparsity=POLICY)
    llm.run(trio(told), [PROMPT])
    windows, num_meetings = MODEL.config.layer_windows, 0
    full = [layer for layer, window in enumerate(windows) if window is None]
    for together, common, held, scores in meetings(POLICY, told[0], diary):
        if len(together) < 3:
            continue
        budget = POLICY.budget
        num_meetings += 1
        # Pieces by who shares them: where they begin, and whose they are.
        joint = {}
        for path in range(3):
            for layer in full:
                for head in (0, 1):
                    for place, value in zip(held[path][layer][head], scores[path][layer][head], strict=True):
                        owners = tuple(other for other in range(3) if common[path][other] > place)
                        joint.setdefault((owners, layer, head, place), {})[path] = value
        joint = {key: np.mean(list(values.values()), dtype=np.float64) for key, values in joint.items()}
        pieces = sorted({owners for owners, *_ in joint}, key=lambda owners: -len(owners))
        left, expected = [budget] * 3, {}
        for piece in pieces:
            wanted = []
            for path in piece:
                mine = [other for other in pieces if path in other and len(other) <= len(piece)]
                sizes = []
                for layer in full:
                    for head in (0, 1):
                        rows = sorted(
                            (-v, k[3], k[0]) for k, v in joint.items() if k[1:3] == (layer, head) and k[0] in mine
                        )
                        sizes.append(sum(owners == piece for *_, owners in sorted(rows)[: left[path]]))
                wanted.append(np.mean(sizes))
            count = int(max(wanted) + 0.5)
            for path in piece:
                below = len({k[3] for k in joint if path in k[0] and len(k[0]) < len(piece) and k[1:3] == (0, 0)})
                left[path] = max(left[path] - count, min(below, POLICY.window))
            for layer in full:
                for head in (0, 1):
                    rows = sorted((-v, k[3]) for k, v in joint.items() if k[:3] == (piece, layer, head))
                    expected[piece, layer, head] = sorted(place for _, place in rows[:count])
        for path, tokens in enumerate(together):
            kept = diary.kept[tuple(tokens)]
            for layer in full:
                for head in (0, 1):
                    mine = [expected[piece, layer, head] for piece in pieces if path in piece]
                    assert kept[layer][head] == [place for own in mine for place in own]
            assert len(kept[0][0]) <= budget + POLICY.window
    assert num_meetings >= 3


@pytest.mark.parametrize("options", [{}, {"looks_ahead": True}], ids=str)
@pytest.mark.parametrize("name", ["snapkv", "adakv", "joint"])
def test_who_gave_way_comes_back_to_the_same(name, options, monkeypatch):
    found = []
    for num_kv_slots in (4096, 210, 180):
        with monkeypatch.context() as patch:
            diary, told = Diary(patch), []
            settings = {"page_size": 1, "enable_prefix_caching": False, "num_kv_slots": num_kv_slots}
            llm = tiny_llm(MODEL, **settings, **options)
            engine = llm.engine
            engine.add(trio(told), PROMPT, seed=0, sparsity=POLICIES[name])
            for step in range(999):
                if step in (12, 25, 30):

                    async def other(root):
                        await generate([root], greedy(25))

                    engine.add(other, [7, 5, 3] * 20 + [step], seed=1, priority=1)
                engine.step()
                engine.check_integrity()
                if not engine.requests:
                    break
            found.append((told, diary.kept))
            assert (engine.scheduler.num_preemptions > 2) == (num_kv_slots < 4096)
            idle(llm)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("num_kv_slots", [176, 144, 128])
def test_branches_that_do_not_fit_at_once_do_not_wait_for_ever(num_kv_slots):
    told = []
    llm = tiny_llm(MODEL, kv_sparsity=POLICY, num_kv_slots=num_kv_slots)
    llm.run(trio(told), [PROMPT])
    assert [len(path) - given for path, given in told[0]] == [26] * 3 and llm.engine.scheduler.num_preemptions
    idle(llm)


def test_a_path_holds_its_budget_and_memory_is_freed():
    policy = KVSparsity.named("snapkv", budget=24, window=4, sinks=1, every=8)
    model, held = tiny_model(max_positions=400), {}
    for name, sparsity in (
        ("dense", None),
        ("prompt", KVSparsity.named("snapkv", budget=24, window=4)),
        ("all", policy),
    ):
        llm = tiny_llm(model, kv_sparsity=sparsity, page_size=1, enable_prefix_caching=False)
        engine, most = llm.engine, [0]

        async def program(root, engine=engine, name=name, most=most):
            branches = root.fork(5)
            for number, branch in enumerate(branches):
                branch.append([30 + number])
            for _ in range(10):
                await generate(branches, greedy(10))
                paths = [engine.kv.forest.path(tip) for tip in root.tree.tips()]
                most[0] = max(sum(len(engine.kv.slots(node)) for node in path) for path in paths)
                assert name != "all" or most[0] <= policy.budget + policy.window + policy.every
            usage = engine.kv.usage(engine.runner.kv_bytes_per_token)
            assert usage.live_slots == engine.kv.num_slots - engine.kv.pool.num_free
            held[name] = usage.live_slots

        llm.run(program, [PROMPT])
        idle(llm)
    assert held["dense"] == 59 + 5 * 100 and held["prompt"] == 24 + 5 * 100
    assert held["all"] <= 24 + 5 * (24 + 8) < held["prompt"] / 2.5


@pytest.mark.parametrize("budget", [160, 1.0])
def test_a_budget_that_holds_all_branches_changes_no_bit(budget):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, logprobs=2, ignore_eos=True)
    found = []
    for name in (None, "snapkv"):
        policy = name and KVSparsity.named(name, budget=budget, every=8)
        llm = tiny_llm(MODEL, kv_sparsity=policy)

        async def program(root):
            branches = root.fork(3)
            await generate(branches, params)
            return [(branch.path_tokens, branch.logprobs) for branch in branches]

        [output] = llm.run(program, [PROMPT])
        found.append(output.value)
    assert found[0] == found[1]


def test_forks_and_pruned_branches_between_stages(monkeypatch):
    diary, told = Diary(monkeypatch), []

    async def program(root):
        first = root.fork(4)
        for number, branch in enumerate(first):
            branch.append([30 + number])
        await generate(first, greedy(15))
        best = keep(first, [1, 3, 2, 0], 2)
        twins = [twin.append([50 + number]) for branch in best for number, twin in enumerate(branch.fork(2))]
        begun = [branch.num_tokens for branch in twins]
        await generate(twins, greedy(20))
        told.append([(branch.path_tokens, given) for branch, given in zip(twins, begun, strict=True)])
        checked(diary, told[-1])
        twins[0].prune()
        [inside] = twins[1].fork(1, at=twins[1].num_tokens - 9)  # in a part that has given up keys
        begun = inside.append([9]).num_tokens
        await generate([inside, twins[2]], greedy(12))
        assert len(inside.path_tokens) == begun + 12

    for options in ({}, {"max_num_rows": 3}, {"looks_ahead": True}):
        llm = tiny_llm(MODEL, kv_sparsity=POLICY, **options)
        llm.run(program, [PROMPT])
        idle(llm)
    assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("wide", [1, 64])
def test_beams_and_guesses(wide, monkeypatch):
    monkeypatch.setattr("treewise.decoding.WIDE", wide)
    beams = tiny_llm(MODEL, kv_sparsity=POLICY, page_size=1)
    diary = Diary(monkeypatch)
    [output] = beams.beam_search([PROMPT], BeamSearchParams(beam_width=4, max_tokens=30, ignore_eos=True))
    assert [len(beam.token_ids) for beam in output.outputs] == [30] * 4
    assert max(number for number, _ in diary.meetings) > 1, "beams are thinned out together"
    idle(beams)
    found = []
    for guesses in (False, True):
        llm, told = tiny_llm(MODEL, kv_sparsity=POLICY), []
        if guesses:
            engine = llm.engine
            engine.speculator = Speculator(Rivals([Noise(), NgramDrafter()]), engine.kv, tree_size=9, adaptive=False)
        llm.run(trio(told), [PROMPT])
        found += told
        idle(llm)
    assert found[0] == found[1]


NUMPY = {
    "knorm": lambda keys, queries, scale: -np.linalg.norm(keys, axis=-1),
    "keydiff": lambda keys, queries, scale: -unit(keys) @ unit(unit(keys).mean(0)),
    "streaming": lambda keys, queries, scale: np.arange(len(keys)),
    "tova": lambda keys, queries, scale: softmax(queries @ keys.T * scale).mean(0),
}


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def softmax(rows):
    weights = np.exp(rows - rows.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("name", NUMPY)
def test_a_new_token_replaces_the_lowest(name, looks_ahead, monkeypatch):
    policy, diary, told = KVSparsity.named(name, budget=14, window=4, sinks=1, every=1), Diary(monkeypatch), []
    llm = tiny_llm(MODEL, kv_sparsity=policy, looks_ahead=looks_ahead, page_size=1)

    async def program(root):
        await generate([root], greedy(16))
        told.append(root.path_tokens)

    llm.run(program, [PROMPT])
    idle(llm)
    stages = diary.stages(told[0])
    assert [end for end, _ in stages][:15] == list(range(59, 59 + 15))
    check_text(told[0], len(PROMPT), stages)
    _, layers = seen_by(told[0], stages)
    for (_, before), (end, kept) in pairwise(stages):
        for layer in (0, 2, 3):
            q, k, *_ = layers[layer]
            there = [[*own, end - 1] for own in before[layer]]
            asked = [q[end - 1, head * 3 : head * 3 + 3].numpy() for head in (0, 1)]
            scores = [
                NUMPY[name](k[own, head].numpy(), asked[head], MODEL.config.attention_scale)
                for head, own in enumerate(there)
            ]
            if name == "tova":
                scores = [np.mean(scores, axis=0)] * 2
            for own, values, left in zip(there, scores, kept[layer], strict=True):
                lowest = min(range(1, len(own) - 4), key=lambda place: (values[place], -place))
                assert left == own[:lowest] + own[lowest + 1 :]


def test_what_was_chosen_is_remembered_in_few_bytes():
    runner, generator = tiny_llm(MODEL).engine.runner, torch.Generator().manual_seed(0)
    for kept in (0, 1, 9, 10, 11, 20):
        which = torch.stack([torch.randperm(20, generator=generator)[:kept].sort().values for _ in range(3)])
        places = [[torch.arange(20)], [torch.arange(7)]]
        [[few], nothing] = remembered = remember(runner, [[which], None], places)
        assert nothing is None and isinstance(few, Few) and few.which.shape[1] == min(kept, 20 - kept)
        [[back], nothing] = recall(runner, remembered, places)
        assert nothing is None and torch.equal(back, which)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("name", ["snapkv", "novita", "adakv", "joint"])
def test_branches_on_a_gpu(name, cuda_graphs, monkeypatch):
    diary, told = Diary(monkeypatch), []
    model = tiny_model(windows=(None, 11, None, None), max_positions=200).to("cuda")
    llm = tiny_llm(model, device="cuda", cuda_graphs=cuda_graphs, kv_sparsity=POLICIES[name])
    llm.run(trio(told), [PROMPT])
    checked(diary, told[0])
    assert any(number == 3 for number, _ in diary.meetings)
    idle(llm)
    there = tiny_llm(MODEL, kv_sparsity=POLICIES[name])
    there.run(trio(told), [PROMPT])
    assert told[0] == told[1]

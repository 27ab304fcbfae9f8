"""Branches that are thinned out together while they decode: what they share, what they have alone, and who waits."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from guesses import Noise, Rivals
from tiny import EOS, dense_logits, idle, tiny_llm, tiny_model

from treewise import BeamSearchParams, SamplingParams, generate, keep
from treewise.kv.kept import num_pages
from treewise.ops import rotate
from treewise.sparsity.evidence import Evidence
from treewise.sparsity.policy import KVSparsity
from treewise.speculate.ngram import NgramDrafter
from treewise.speculate.speculator import Speculator
from treewise.survivors import Few, recall, remember
from treewise.thinning import Thinner

sys.path.insert(0, str(Path(__file__).parent))

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


def checked(llm, diary, paths):
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
        checked(llm, diary, told[-1])
        idle(llm)
    assert all(paths == told[0] for paths in told)
    assert any(number == 3 and len(parts) == 5 for number, parts in diary.meetings), "the prompt, what two share, tails"


def reference(policy, paths, diary):
    """Yield of each meeting what is kept of each path, by numpy, and what was."""
    windows = MODEL.config.layer_windows
    ends = sorted({end for path, _ in paths for end, _ in diary.stages(path)})
    for end in ends[1:]:
        together = [path[:end] for path, _ in paths]
        together = [list(path) for path in dict.fromkeys(map(tuple, together)) if tuple(path) in diary.kept]
        shared = [[len(prefix(one, other)) for other in together] for one in together]
        held, scores = [], []
        for path in together:
            stages = [stage for stage in diary.stages(path) if stage[0] < end]
            base, kept = stages[-1]
            _, layers = seen_by(path, stages)
            there = [[[*own, *range(base, end)] for own in kept[layer]] for layer in range(len(windows))]
            held.append(there)
            scores.append([scores_of(policy, layers[layer], there[layer], end, base) for layer in range(len(windows))])
        cuts = sorted({0, *(end for row in shared for end in row)})
        budgets = [policy.budgets(end, windows.count(None)) for _ in together]
        yield together, cuts, shared, held, scores, budgets[0]


def prefix(one, other):
    return one[
        : next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    ]


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
    for together, _, shared, held, scores, [budget, *_] in reference(POLICY, told[0], diary):
        if len(together) < 3:
            continue
        num_meetings += 1
        # Pieces by who shares them: where they begin, and whose they are.
        joint = {}
        for path in range(3):
            for layer in full:
                for head in (0, 1):
                    for place, value in zip(held[path][layer][head], scores[path][layer][head], strict=True):
                        owners = tuple(other for other in range(3) if shared[path][other] > place)
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
                        sizes.append(sum(owners == piece for *_, owners in rows[: left[path]]))
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

"""Thickets: against a trie of objects, and searches that keep to arrays against those that look at every leaf."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from stress import Widening
from tiny import dense_logits, idle, tiny_llm, tiny_model

from treewise import BeamSearchParams, SamplingParams, call, decode, gather, generate
from treewise.batch import Batch
from treewise.config import SamplingParams as Params
from treewise.controller import BeamSearch, Rows, TreeView
from treewise.kv import KVManager, OutOfSlots, make_pool
from treewise.outputs import draw
from treewise.plan import plan_tree
from treewise.thicket import Thicket
from treewise.tree import Forest

MODEL = tiny_model()
PROMPT = list(range(1, 40))


@pytest.fixture(autouse=True)
def every_search_is_wide(monkeypatch):
    monkeypatch.setattr("treewise.decoding.WIDE", 1)


class Trie:
    """What a thicket stands for: an object a token."""

    def __init__(self, parent: Trie | None, token: int) -> None:
        self.parent, self.token, self.children, self.ended = parent, token, [], False

    def path(self) -> list[int]:
        return [] if self.parent is None else [*self.parent.path(), self.token]

    def living(self, rows: list[Trie]) -> bool:
        return self.ended or self in rows or any(child.living(rows) for child in self.children)


def computed_node(kv: KVManager, tokens: list[int]):
    node = kv.hold(kv.forest.add(None, tokens))
    kv.extend(node, len(tokens))
    node.computed = len(tokens)
    return node


@pytest.mark.parametrize("number_of_bases", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_thicket_is_a_trie_with_a_slot_for_each_living_token(seed, number_of_bases):
    draw_number = random.Random(seed)
    kv = KVManager(Forest(), make_pool("paged", 4096, draw_number.choice([1, 16])))
    bases = [computed_node(kv, [number + 1] * draw_number.randrange(1, 20)) for number in range(number_of_bases)]
    free = kv.pool.num_free
    thicket = Thicket(kv, None, bases, [0.0] * len(bases))
    tries = [Trie(None, -1) for _ in bases]
    base_of, rows = {trie: place for place, trie in enumerate(tries)}, list(tries)
    for step in range(1, 12):
        parents = sorted(draw_number.choices(range(len(rows)), k=draw_number.randrange(1, 9)))
        tokens = [draw_number.randrange(100) for _ in parents]
        new = []
        for parent, token in zip(parents, tokens, strict=True):
            new.append(Trie(rows[parent], token))
            rows[parent].children.append(new[-1])
            base_of[new[-1]] = base_of[rows[parent]]
        thicket.add(np.array(parents), np.array(tokens), -np.ones(len(parents)), step)
        ends = [draw_number.random() < 0.1 and len(new) > 1 for _ in new[1:]] + [False]
        for trie, ended in zip(new, ends, strict=True):
            trie.ended = ended
        rows = [trie for trie in new if not trie.ended]
        thicket.end(np.array(ends))
        thicket.reserve()
        assert thicket.base[thicket.rows].tolist() == [base_of[trie] for trie in rows]
        assert thicket.paths(thicket.rows) == [trie.path() for trie in rows]
        lengths = [bases[base_of[trie]].end + len(trie.path()) for trie in rows]
        assert thicket.length[thicket.rows].tolist() == list(thicket.lengths(0, len(rows))) == lengths
        assert thicket.total[thicket.rows].tolist() == [-len(trie.path()) for trie in rows]

        slots = thicket.slot[thicket.standing]
        slots = slots[slots >= 0]
        assert len(set(slots.tolist())) == len(slots) and (slots >= kv.pool.page_size).all()
        stack, living = list(tries), 0
        while stack:
            trie = stack.pop()
            living += trie not in tries and not trie.ended and trie.living(rows)
            stack.extend(trie.children)
        assert len(slots) == living

        batch = Batch()
        batch.add_thicket(thicket, len(rows))
        spec, spec_slots = batch.tree_spec(kv)
        assert (spec.below is None) == (len(set(thicket.base[thicket.standing])) > 1)
        plan = plan_tree(spec, "deft:flatten", slots=spec_slots, num_heads=1, num_kv_heads=1, head_dim=8)
        seen = [[] for _ in rows]
        for number, (low, high, start, stop, *_) in enumerate(plan.items.tolist()):
            for row, sees in zip(plan.row_order[low:high], plan.visible(number), strict=True):
                seen[row] += plan.kv_slots[start:stop][sees].tolist()
        for row, entry in enumerate(thicket.rows.tolist()):
            expected = kv.slots(bases[thicket.base[entry]]).tolist()
            while entry >= len(bases):
                expected.append(int(thicket.slot[entry]))
                entry = int(thicket.parent[entry])
            assert sorted(seen[row]) == sorted(expected) and -1 not in expected
        thicket.take(len(rows))
        kv.check_integrity()
    thicket.give_back(thicket.standing)
    assert kv.pool.num_free == free
    kv.check_integrity()


def test_a_thicket_that_finds_no_slots_is_as_it_was():
    kv = KVManager(Forest(), make_pool("paged", 64, 16))
    thicket = Thicket(kv, None, [computed_node(kv, [1, 2, 3])], [0.0])
    thicket.add(np.zeros(33, np.int64), np.arange(33), np.zeros(33), 1)
    with pytest.raises(OutOfSlots):
        thicket.reserve()
    assert (thicket.slot[thicket.rows] == -1).all() and kv.pool.num_free == 32
    thicket.add(np.array([0, 5]), np.arange(2), np.zeros(2), 2)
    thicket.reserve()
    assert len(set(thicket.slot[thicket.rows].tolist())) == 2


def test_a_thicket_of_which_nothing_goes_on_has_no_slots():
    kv = KVManager(Forest(), make_pool("paged", 64, 1))
    thicket = Thicket(kv, None, [computed_node(kv, [1, 2, 3])], [0.0])
    for step, parents in ((1, [0, 0]), (2, [0, 0, 1]), (3, [])):
        thicket.add(np.array(parents, np.int64), np.arange(len(parents)), np.zeros(len(parents)), step)
        thicket.reserve()
    assert thicket.done and not len(thicket.standing)
    assert thicket.died[: thicket.size].tolist() == [3] * 6
    assert (thicket.slot[1 : thicket.size] == -1).all()


class Looking:
    """A controller that looks at every leaf, whatever the one inside does."""

    def __init__(self, inner) -> None:
        self.inner, self.stopping = inner, inner.stopping

    def step(self, tree: TreeView, logprobs: torch.Tensor) -> Rows | None:
        assert len(list(tree.leaves)) == len(logprobs) and all(leaf.path is not None for leaf in tree.finished)
        return self.inner.step(tree, logprobs)


class Wandering:
    """Branches and prunes at random, looking at nothing, and ends the operation after some steps."""

    def __init__(self, seed: int, steps: int) -> None:
        self.draw, self.steps = random.Random(seed), steps
        self.stopping = Params(max_tokens=9, stop_token_ids=range(10, 40))

    def step(self, tree: TreeView, logprobs: torch.Tensor) -> Rows | None:
        if tree.depth == self.steps:
            return None
        parents = self.draw.choices(range(len(tree.leaves)), k=self.draw.randrange(1, 9))
        best = logprobs.topk(8).indices
        return Rows(parents, [int(best[parent, i]) for i, parent in enumerate(parents)])


def story(llm, controllers, prompt=PROMPT, forks=1):
    """Run an operation after the other below one tree; what there is to know about the branches and what they cost."""
    told = []

    async def program(root):
        leaves = root.fork(forks)
        for controller in controllers:
            leaves = await decode(leaves, controller)
            told.append([(leaf.path, leaf.token_ids, leaf.key, leaf.text, leaf.finish_reason) for leaf in leaves])
            told.append([round(leaf.logprob, 3) for leaf in leaves])
            leaves = [leaf for leaf in leaves if not leaf.finished]
            llm.engine.check_integrity()
            if not leaves:
                break
        ended = await generate(leaves, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
        for leaf in ended:
            assert leaf.token_ids[-3:] == dense_logits(MODEL, leaf.path_tokens)[-4:-1].argmax(-1).tolist()
        return ended

    [output] = llm.run(program, [prompt], seed=5)
    told.append([(node.parent, node.token_ids, node.state, node.finish_reason) for node in output.tree.nodes])
    told.append([round(node.logprob, 3) for node in output.tree.nodes])
    told.append(output.tree.usage.completion_tokens)
    idle(llm)
    return told


@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"pool": "contiguous"}, {"max_num_rows": 3}])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_kept_in_arrays_becomes_the_branches_that_it_stands_for(seed, options):
    def controllers():
        return [Wandering(seed, 4), BeamSearch(BeamSearchParams(5, max_tokens=6)), Wandering(seed + 9, 3)]

    for forks in (1, 3):
        seen = story(tiny_llm(MODEL), [Looking(each) for each in controllers()], forks=forks)
        assert story(tiny_llm(MODEL, **options), controllers(), forks=forks) == seen


@pytest.mark.parametrize("num_kv_slots", [176, 208, 256, 512])
def test_searches_beside_others_in_a_small_pool(num_kv_slots):
    """Wide searches that have to give way, in the midst of programs that look at branches."""

    async def search(root):
        leaves = await decode(root.fork(), Widening(8, 12))
        return [leaf.token_ids for leaf in leaves]

    async def mixed(root):
        async def sampled(branch):
            await generate([branch], SamplingParams(temperature=0, max_tokens=7, ignore_eos=True))
            await call(sum, [1])
            return branch.token_ids

        return await gather(search(root), sampled(root.fork()[0]), search(root))

    prompts = [PROMPT[:20], PROMPT[5:17]]
    expected = [output.value for output in tiny_llm(MODEL).run(mixed, prompts)]
    llm = tiny_llm(MODEL, num_kv_slots=num_kv_slots)
    assert [output.value for output in llm.run(mixed, prompts)] == expected
    assert [output.value for output in llm.run(mixed, prompts, priority=[0, 1])] == expected
    idle(llm)


def test_a_search_is_seen_while_it_goes_on():
    """The drawing of a tree, its usage and an aborted one tell of what is still in arrays."""
    llm = tiny_llm(MODEL)

    async def program(root):
        return await decode([root], BeamSearch(BeamSearchParams(4, max_tokens=30)))

    request = llm.engine.add(program, PROMPT)
    counts = []
    for _ in range(6):
        [gain] = llm.engine.step()
        counts.append(gain.num_tokens)
    nodes, _ = draw(request.tree)
    assert sum(len(node.token_ids) for node in nodes) == len(PROMPT) + sum(counts)
    assert sum(node.state == "live" for node in nodes) == 4
    llm.engine.check_integrity()
    llm.engine.step()
    llm.engine.abort(request)
    assert request.usage().completion_tokens > sum(counts)
    idle(llm)


def test_pieces_of_beams_come_as_they_are_decoded():
    llm = tiny_llm(MODEL)

    async def program(root):
        return await decode([root], Widening(4, 6))

    stream = llm.stream_program(program, PROMPT)
    text: dict = {}
    for branch, piece in stream:
        parent = branch
        while parent not in text and parent.parent is not None:
            parent = parent.parent
        text[branch] = text.get(parent, "") + piece
    [output] = llm.run(program, [PROMPT])
    assert {answer.text for answer in output.outputs} <= set(text.values())
    idle(llm)


def test_a_wide_search_makes_branches_at_its_end_only():
    llm = tiny_llm(MODEL)

    async def program(root):
        return await decode([root], BeamSearch(BeamSearchParams(16, max_tokens=12)))

    request = llm.engine.add(program, PROMPT)
    while not request.done:
        assert len(request.tree.alive) == 1 or not llm.engine.runs
        llm.engine.step()
    assert len(request.result) == 16
    assert not any(branch.pruned for leaf in request.result for branch in leaf.parent.known_children)
    assert any(branch.pruned for branch in request.tree.branches())
    idle(llm)


@pytest.mark.parametrize("options", [{}, {"pool": "contiguous"}, {"num_kv_slots": 96, "page_size": 1}])
def test_the_branches_of_a_wide_search_go_on_as_any_others(options):
    """They have no nodes of their own until then: forked, cut short, appended to, decoded, pruned."""

    async def program(root):
        leaves = await decode([root], BeamSearch(BeamSearchParams(12, max_tokens=4)))
        num_nodes = len(list(root.tree.kv.forest))
        assert num_nodes < len(leaves)
        longer = leaves[0].append([5, 6])
        shorter = leaves[1].fork(2, at=leaves[1].num_tokens - 1)
        for leaf in leaves[8:]:
            leaf.prune()
        chosen = [longer, *shorter, *leaves[2:5], leaves[5].scratch()]
        begins = [list(branch.path_tokens) for branch in chosen]
        await generate(chosen, SamplingParams(max_tokens=3, temperature=0))
        return [(begin, branch.path_tokens) for begin, branch in zip(begins, chosen, strict=True)]

    llm = tiny_llm(MODEL, **options)
    [output] = llm.run(program, [PROMPT])
    for begin, path in output.value:
        assert path[: len(begin)] == begin
        for length in range(len(begin), len(path)):
            assert path[length] == int(dense_logits(MODEL, path[:length])[-1].argmax())
    idle(llm)

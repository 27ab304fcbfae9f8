"""One plan for many steps of guesses, whatever their shape."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import greedy, idle, tiny_llm, tiny_model

from treewise import SamplingParams
from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.batch import ACCEPTED
from treewise.plan.data import upload_together
from treewise.plan.layout import pack
from treewise.speculate.speculator import Speculator
from treewise.speculate.trees import EMPTY, TokenTree
from treewise.stems import ROOM, StemPlanner

MODEL = tiny_model()
SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float32}


def random_tree(generator, size):
    parents = [int(generator.integers(-1, node)) for node in range(size)]
    return TokenTree.of(generator.integers(50, size=size), parents).depth_first()


class Named:
    """A node, by identity."""

    def __init__(self, parent, length):
        self.parent, self.tokens = parent, [0] * length


class Forest:
    """A shared prompt and the leaves below it, each with slots of its own."""

    def __init__(self, generator, lengths):
        self.slots = {}
        self.free = iter(generator.permutation(4000))
        self.root = self.node(None, 20)
        self.leaves = [self.node(self.root, length) for length in lengths]

    def node(self, parent, length):
        node = Named(parent, length)
        self.slots[node] = self.take(length)
        return node

    def take(self, count):
        return np.array([next(self.free) for _ in range(count)], np.int32)

    def grow(self, node, count):
        node.tokens += [0] * count
        self.slots[node] = np.concatenate([self.slots[node], self.take(count)])

    def path(self, node):
        return [self.root, node]

    def path_slots(self, node):
        return np.concatenate([self.slots[self.root], self.slots[node]])


@pytest.mark.parametrize("method", ["auto", "deft:flatten", "deft:node", "radix"])
@pytest.mark.parametrize("backend", ["cpu", "triton", "hopper"])
def test_a_plan_that_goes_on_is_a_new_one(method, backend):
    """Whatever kernels the plan was cut for: results in double precision, with trees of other shapes in each step."""
    generator = np.random.default_rng(len(method))
    forest = Forest(generator, [30, 1, 70])
    made = []

    def make(spec, slots, open_tokens):
        made.append(spec)
        plan = plan_tree(spec, method, slots=slots, open_tokens=open_tokens, backend=backend, **SHAPE)
        plan.tensors = {name: tensor.clone() for name, tensor in plan.tensors.items()}  # as on a device
        return {None: plan}

    def step_of(stems):
        [plan] = planner.plan(stems, kv).values()
        plan.receive(iter(upload_together(plan.unsent, plan.device)))
        return plan

    planner = StemPlanner(make)
    k, v = torch.randn(2, 4000, 2, 8)
    kv = SimpleNamespace(forest=forest, slots=forest.slots.__getitem__, path_slots=forest.path_slots)
    for step in range(12):
        if step % 3 != 1:  # else the guesses are where they were, and of the same shape
            trees = [random_tree(generator, size) for size in (9, 40)]
            guesses = [SimpleNamespace(rows=np.arange(len(t)), below=t.sizes, slot=forest.take(len(t))) for t in trees]
        stems = list(zip(forest.leaves, [guesses[0], None, guesses[1]], strict=True))
        plan = step_of(stems)
        assert plan.tensors["kv_slots"].tolist() == plan.kv_slots.tolist()
        assert plan.tensors["kv_readers"].tolist() == pack(plan.kv_low, plan.kv_high).tolist()
        q = torch.randn(3 + 9 + 40, 4, 8)
        parents, lengths, slots, nodes = [-1, 0, 0, 0], [20], [forest.slots[forest.root]], [1, 2, 3]
        for leaf in forest.leaves:
            lengths.append(len(leaf.tokens))
            slots.append(forest.slots[leaf])
        for leaf, tree, own in ((1, trees[0], guesses[0]), (3, trees[1], guesses[1])):
            first = len(parents)
            parents += [leaf if above < 0 else first + above for above in tree.parents.tolist()]
            lengths += [1] * len(tree)
            slots.append(own.slot)
            nodes += range(first, first + len(tree))
        fresh = plan_tree(TreeSpec(parents, lengths, nodes), "reference", slots=np.concatenate(slots), **SHAPE)
        expected = run_plan(fresh, q, k, v)
        torch.testing.assert_close(run_plan(plan, q, k, v, backend="reference"), expected, rtol=1e-4, atol=1e-5)
        assert plan.io().kv_once > 0
        for leaf, count in zip(forest.leaves, (1 + step % 5, 1, 3), strict=True):
            forest.grow(leaf, count)
    planner.plan_ahead(stems, kv)
    assert len(made) == 1
    forest.grow(forest.leaves[2], ROOM)
    step_of(stems)
    assert len(made) == 2
    forest.grow(forest.leaves[1], ROOM - ACCEPTED + 1)
    step_of(stems)
    assert len(made) == 2
    planner.plan_ahead(stems, kv)
    assert len(made) == 3
    forest.grow(forest.leaves[1], ACCEPTED)
    step_of(stems)
    assert len(made) == 3
    forest.slots[forest.leaves[1]][0] += 1  # a key has moved
    planner.plan(stems, kv)
    assert len(made) == 4
    [plan] = planner.plan(stems, kv).values()  # the step before has failed before the device knew
    assert len(made) == 4 and plan.tensors["kv_slots"].tolist() == plan.kv_slots.tolist()


def test_plans_of_other_numbers_of_guesses_come_back():
    """Each has the device to itself, as in a graph that keeps what the last plan has there."""
    generator = np.random.default_rng(0)
    forest = Forest(generator, [30])
    kv = SimpleNamespace(forest=forest, slots=forest.slots.__getitem__, path_slots=forest.path_slots)
    made, loaded, there = [], None, {}

    def make(spec, slots, open_tokens):
        made.append(spec)
        plan = plan_tree(spec, "deft:flatten", slots=slots, open_tokens=open_tokens, **SHAPE)
        plan.tensors = {name: tensor.clone() for name, tensor in plan.tensors.items()}
        return {None: plan}

    planner = StemPlanner(make)
    for step in range(24):
        tree = random_tree(generator, (9, 20, 9, 14)[step % 4])
        guesses = SimpleNamespace(rows=np.arange(len(tree)), below=tree.sizes, slot=forest.take(len(tree)))
        plans = planner.plan([(forest.leaves[0], guesses)], kv)
        [plan] = plans.values()
        plan.receive(iter(upload_together(plan.unsent, plan.device)))
        if plans is not loaded:
            loaded = plans
            for name in ("row_order", "kv_slots", "kv_readers", "reduce_entries"):
                place = there.setdefault(name, torch.zeros(4000, dtype=plan.tensors[name].dtype))[
                    : len(plan.tensors[name])
                ]
                plan.tensors[name] = place.copy_(plan.tensors[name])
        for name in ("row_order", "kv_slots", "reduce_entries"):
            assert there[name][: len(getattr(plan, name))].tolist() == getattr(plan, name).tolist()
        readers = pack(plan.kv_low, plan.kv_high)
        assert there["kv_readers"][: len(readers)].tolist() == readers.tolist()
        if step % 8 == 7:
            planner.forget()  # a step without guesses
            there["kv_slots"].zero_()
        forest.grow(forest.leaves[0], 1 + step % 3)
    assert len(made) == 3


class Sometimes:
    """Guesses what is right so far, and wrong tokens beside, in trees of one size and many shapes."""

    wants_hidden = False

    def __init__(self, expected):
        self.expected = expected
        self.count = 0

    def draft(self, stems, size, step):
        trees = []
        for stem in stems:
            self.count += 1
            following = next(own[len(stem.tokens) :] for own in self.expected if own[: len(stem.tokens)] == stem.tokens)
            right = following[: self.count % 5]
            parents = [*range(-1, len(right) - 1), *(place % (len(right) + 1) - 1 for place in range(7 - len(right)))]
            tokens = [*right, *(100 + place for place in range(7 - len(right)))]
            trees.append(TokenTree.of(tokens, parents) if following else EMPTY)
        return trees


@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"num_kv_slots": 400}])
def test_what_is_decoded_is_the_same_and_plans_are_few(options):
    prompts = [[7, 1, 9], list(range(1, 40)), [5] * 20]
    expected = [prompt + greedy(MODEL, prompt, 40) for prompt in prompts]
    llm = tiny_llm(MODEL, **options)
    engine = llm.engine
    engine.speculator = Speculator(Sometimes(expected), engine.kv, 64, adaptive=False)
    made = []
    make = partial(engine.runner._plan, room=0)
    engine.runner.stems = StemPlanner(lambda *given: (made.append(given), make(*given))[1])
    for _ in ("cold", "warm"):
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
        assert [
            prompt + output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)
        ] == expected
    assert 0 < len(made) < engine.num_steps / 2
    idle(llm)


def test_open_tokens_want_a_plan_that_can_hide_them():
    tree = TreeSpec([-1], [4], [0])
    for settings in ({"room": 2}, {"window": 3}, {"method": "medusa"}, {"mask": "words", "method": "deft:node"}):
        with pytest.raises(ValueError, match="open_tokens is 1; it must be at least 0, and needs a method with mask"):
            plan_tree(tree, slots=[0, 1, 2, -1], open_tokens=1, **SHAPE, **settings)
    with pytest.raises(ValueError, match="slots"):
        plan_tree(tree, slots=[0, 1, -2, -1], open_tokens=1, **SHAPE)

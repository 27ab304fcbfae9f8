"""What ranks are told: messages of any length, and plans that only grow or are filled, so that all decide alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ranks_here import CPU, on_ranks

from treewise.attention import plan_tree, run_plan
from treewise.graphs import GraphCache, Kind
from treewise.kv import Copy
from treewise.parallel.group import FIRST
from treewise.parallel.orders import Call, Forward, Growth, PlanHearer, PlanTeller, read, write
from treewise.plan import TreeSpec
from treewise.plan.layout import pack
from treewise.runner import Step

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
TREE = TreeSpec([-1, 0, 0, 0], [40, 3, 5, 2], [1, 2, 3])


@pytest.mark.parametrize("size", [2, 3])
def test_messages_of_any_length_arrive(size):
    messages = [bytes(range(256)) * 100, b"", b"x", *(b"y" * (FIRST - 8 + more) for more in (-1, 0, 1, FIRST))]

    def work(group):
        if group.rank == 0:
            for message in messages:
                group.say(message)
            return messages
        return [group.hear() for _ in messages]

    assert on_ranks(size, work) == [messages] * size


def test_an_order_arrives_as_it_was():
    rows = np.arange(12).reshape(3, 4)
    copies = [Copy(np.array([1, 2], np.int32), np.array([5, 6], np.int32))]
    step = Step(rows, {}, np.array([1, 3]), copies, True)
    order, dropped = read(write(Forward(3, step, {}, 7, [], False), [1, 2], {}), {})
    assert isinstance(order, Forward) and dropped == [1, 2]
    assert (order.number, order.num_drawn, order.step.is_decoding) == (3, 7, True)
    assert (order.step.rows == rows).all() and order.step.logit_rows.tolist() == [1, 3]
    assert order.step.copies[0].target.tolist() == [5, 6]


def test_what_calls_have_returned_travels_as_its_number():
    mine, theirs = [torch.zeros(2)], [torch.ones(3)]
    order, _ = read(write(Call(0, len, ([mine, 5],), 7), [], {id(mine): 4}), {4: theirs})
    assert isinstance(order, Call) and order.function is len and order.result == 7
    [[kept, number]] = order.arguments
    assert kept is theirs and number == 5


class Wire:
    """Two ends that tell and hear of plans, with a message in between."""

    def __init__(self):
        self.teller, self.hearer = PlanTeller(), PlanHearer(CPU)
        self.news = {}

    def send(self, plans):
        step = Step(np.zeros((3, 1), np.int64), {}, None, [], True)
        order, _ = read(write(Forward(0, step, self.teller.tell(plans), None, [], False), [], {}), {})
        assert isinstance(order, Forward)
        self.news = order.news
        heard = self.hearer.hear(order.news)
        for kind, plan in plans.items():
            same(plan, heard[kind])
        return heard

    @property
    def is_whole(self):
        return all(not isinstance(told, Growth) for told in self.news.values())


def same(plan, heard):
    """Both ends attend alike."""
    torch.manual_seed(0)
    q, k, v = torch.randn(plan.num_rows, 4, 8), *torch.randn(2, 200, 2, 8)
    for each in (plan, heard):
        if each.unsent:
            each.receive(iter(map(torch.from_numpy, each.unsent)))
    assert torch.equal(run_plan(plan, q, k, v), run_plan(heard, q, k, v))
    assert plan.grown == heard.grown and plan.num_slots == heard.num_slots


@pytest.mark.parametrize("method", ["radix", "deft:node", "deft:flatten", "medusa", "specinfer", "vanilla"])
def test_a_plan_arrives_whole(method):
    wire = Wire()
    wire.send({Kind(None): plan_tree(TREE, method, **SHAPE), Kind(7): plan_tree(TREE, method, window=7, **SHAPE)})
    assert wire.is_whole


@pytest.mark.parametrize("window", [None, 9])
def test_growth_is_all_that_is_told_of_a_plan_that_grew(window):
    wire, plan = Wire(), plan_tree(TREE, room=8, window=window, **SHAPE)
    plans = {Kind(window): plan}
    first = wire.send(plans)
    for step in range(1, 5):
        for more in range(1 + step % 2):  # steps that were planned and failed are told later
            plan.grow([100 + 10 * step + 3 * more, 101 + 10 * step + 3 * more, 102 + 10 * step + 3 * more])
        assert wire.send(plans) is first and not wire.is_whole
    assert wire.send({**plans}) is not first and wire.is_whole  # perhaps what is on the device is not this any more


def test_what_open_tokens_become_is_told():
    tree = TreeSpec([-1, 0], [30 + 4, 3], [0, 1, 1, 1], [33, 2, 2, 2])
    slots = np.concatenate((np.arange(30), -1 - np.arange(4), -5 - np.arange(3)))
    wire, plan = Wire(), plan_tree(tree, "radix", slots=slots, open_tokens=7, **SHAPE)
    plans = {Kind(None): plan}
    for number in range(3):
        places, which = plan.places(np.array([number, 4, 5, 6]))
        readers = pack(np.array([0, 1, 2, 3]), np.array([4, 4, 3, 4]))
        plan.fill(places, np.array([50 + number, 61, 62, 63 + number])[which], readers[which])
        wire.send(plans)
        assert wire.is_whole == (number == 0)


def test_ranks_capture_and_replay_alike():
    pytest.importorskip("treewise.attention.buffers", reason="needs triton", exc_type=ImportError)

    def cache():
        return GraphCache(lambda rows, *_: rows[:, None], 0, capture=lambda function: (lambda: None, function()))

    generator, wire = np.random.default_rng(0), Wire()
    mine, theirs = cache(), cache()
    plans = {}
    for _ in range(60):
        if not plans or generator.random() < 0.4:
            rows = int(generator.integers(1, 9))
            lengths = generator.integers(1, 60, rows + 1)
            tree = TreeSpec([-1] + [0] * rows, lengths, range(1, rows + 1))
            plans = {Kind(None): plan_tree(tree, "deft:flatten", room=8, slots=np.arange(lengths.sum()) % 100, **SHAPE)}
        plan = plans[Kind(None)]
        if plan.grown < len(plan.room):
            plan.grow(generator.integers(100, 200, plan.num_rows))
        inputs = torch.arange(3 * plan.num_rows).view(3, -1)
        heard = wire.send(plans)
        results = mine.run(inputs, plans), theirs.run(inputs, heard)
        assert (results[0] is None) == (results[1] is None)
        assert (mine.num_captures, mine.num_replays) == (theirs.num_captures, theirs.num_replays)
    assert mine.num_captures > 1 and mine.num_replays > 10

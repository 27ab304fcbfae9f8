"""Which rows run: growing batches, shares of rows, priorities, who gives way; the prefix cache between requests."""

from itertools import pairwise

import numpy as np
import pytest
from tiny import Bytes, dense_logits, greedy, idle, tiny_llm, tiny_model

from treewise import Rows, SamplingParams, decode, generate
from treewise.batch import Batch
from treewise.branch import BranchTree
from treewise.kv import KVManager, make_pool
from treewise.plan import plan_tree
from treewise.scheduler import Lane, Scheduler, _Line
from treewise.tree import Forest

MODEL = tiny_model(max_positions=600)
GREEDY = SamplingParams(temperature=0, max_tokens=8)


class Trees:
    """Trees without a model: whatever is scheduled is pretended to have been computed."""

    def __init__(self, prompts, num_slots=4096, page_size=16, max_num_rows=256, pool="paged"):
        self.kv = KVManager(Forest(), make_pool(pool, num_slots, page_size))
        self.scheduler = Scheduler(self.kv, max_num_rows)
        self.trees = [BranchTree(self.kv, Bytes(), prompt, 0, i) for i, prompt in enumerate(prompts)]

    def lanes(self, branches):
        return [Lane(branch.tree, branch.end, branch.num_tokens - 1, branch.num_tokens) for branch in branches]

    def step(self, branches):
        """Schedule once; the batch and the branches whose logits it gives."""
        lanes = self.lanes(branches)
        batch, deliveries = self.scheduler.next_batch(lanes, self.trees)
        owners = dict(zip(lanes, branches, strict=True))
        self.check(batch)
        self.scheduler.commit(batch, deliveries)
        self.kv.take_copies()
        self.kv.check_integrity()
        return batch, [owners[delivery.lane] for delivery in deliveries if delivery.lane.done]

    def check(self, batch):
        """The rows are the spans, whatever way the batch came about."""
        rows = [(s.node, at + batch.grown, s.store) for s in batch.spans for at in range(s.start, s.end)]
        assert len(rows) == batch.num_rows <= self.scheduler.max_num_rows
        assert batch.tokens().tolist() == [node.tokens[at] for node, at, _ in rows]
        assert batch.positions().tolist() == [node.start + at for node, at, _ in rows]
        slots = [self.kv.slots(node)[at] if store else self.kv.pool.scratch_slot for node, at, store in rows]
        assert batch.store_slots(self.kv).tolist() == slots
        spec, _ = batch.tree_spec(self.kv)
        depth = np.cumsum(np.zeros(spec.num_nodes, int))
        for node, parent in enumerate(spec.parent):
            depth[node] = spec.length[node] + (depth[parent] if parent >= 0 else 0)
        assert (depth[spec.query_node] - spec.length[spec.query_node] + spec.query_offset == batch.positions()).all()


def grow(branches, token=5):
    for branch in branches:
        branch.grow([token], [-1.0], [None])


# ---------------------------------------------------------------------- batches that grow


@pytest.mark.parametrize(("pool", "page_size"), [("paged", 1), ("paged", 16), ("contiguous", 1)])
def test_trees_that_only_grow_keep_their_batch(pool, page_size):
    trees = Trees([list(range(1, 20)), list(range(50, 90))], pool=pool, page_size=page_size)
    leaves = [leaf for tree in trees.trees for leaf in tree.root.fork(5)]
    for i, leaf in enumerate(leaves):
        leaf.append([1 + i])
    seen = []
    for _ in range(60):
        batch, served = trees.step(leaves)
        assert served == leaves
        seen.append(batch)
        grow(leaves)
    kept = sum(after is before for before, after in pairwise(seen))
    assert kept == 58 if pool == "paged" else kept > 40, "runs that outgrow their place are moved"
    assert seen[-1].grown > 10


def test_a_batch_that_has_grown_says_what_a_plan_with_room_needs():
    trees = Trees([list(range(1, 40))])
    leaves = trees.trees[0].root.fork(3)
    for i, leaf in enumerate(leaves):
        leaf.append([1 + i])
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    trees.step(leaves)
    grow(leaves)
    batch, _ = trees.step(leaves)
    assert batch.can_grow
    spec, slots = batch.tree_spec(trees.kv)
    plan = plan_tree(spec, slots=slots, room=4, **shape)
    for _ in range(4):
        grow(leaves)
        again, _ = trees.step(leaves)
        assert again is batch
        plan.grow(batch.store_slots(trees.kv))
        spec, slots = batch.tree_spec(trees.kv)
        anew = plan_tree(spec, slots=slots, **shape)
        for row in range(3):
            seen = [sorted(p.kv_slots[(p.kv_low <= r) & (r < p.kv_high)]) for p, r in _rows(row, plan, anew)]
            assert seen[0] == seen[1]


def _rows(query, *plans):
    return [(plan, plan.row_order.tolist().index(query)) for plan in plans]


def test_forks_prunings_newcomers_and_cuts_end_a_batch():
    trees = Trees([list(range(1, 40))])
    [tree] = trees.trees
    leaves = tree.root.fork(4)

    def settle():
        grow(leaves)
        first, _ = trees.step(leaves)
        grow(leaves)
        second, served = trees.step(leaves)
        assert second is first and served == leaves
        return first

    trees.step(leaves)
    batch = settle()
    leaves += leaves[1].fork(2)  # one was forked
    leaves.remove(leaves[1])
    assert settle() is not batch
    batch = settle()
    leaves.pop().prune("the test")
    assert settle() is not batch
    batch = settle()
    tree.root.fork(at=7)  # a node above all of them was cut
    assert settle() is not batch
    batch = settle()
    trees.trees.append(BranchTree(trees.kv, Bytes(), [9, 9], 0, 1))
    leaves.append(trees.trees[1].root)
    trees.step(leaves)
    assert settle() is not batch
    batch = settle()
    trees.kv.preempt([leaves[0].tip])
    grow(leaves)
    assert trees.step(leaves)[0] is not batch


def test_rows_of_siblings_come_together():
    trees = Trees([list(range(1, 40)), [9, 9]])
    left, right = (branch.append([50 + i]) for i, branch in enumerate(trees.trees[0].root.fork(2)))
    leaves = [branch.append([i]) for i, branch in enumerate([*left.fork(3), *right.fork(3)], 1)]
    trees.step([*leaves, trees.trees[1].root])
    leaves = [leaves[i] for i in (0, 3, 1, 4, 2, 5)]
    grow(leaves)
    batch, served = trees.step(leaves)
    assert served == leaves
    assert [span.node.tokens[0] for span in batch.spans] == [1, 2, 3, 4, 5, 6]
    spec, slots = batch.tree_spec(trees.kv)
    plan = plan_tree(spec, slots=slots, num_heads=2, num_kv_heads=1, head_dim=8)
    assert plan.row_order.tolist() == list(range(6))


def test_a_batch_is_kept_while_others_wait_for_room_and_no_longer():
    trees = Trees([list(range(1, 40)), list(range(50, 90)), [7] * 100], num_slots=12 * 16)
    running, waiting = [tree.root for tree in trees.trees[:2]], trees.trees[2].root
    trees.step(running)
    grow(running)
    first, served = trees.step([*running, waiting])
    assert served == running
    for _ in range(5):
        grow(running)
        again, served = trees.step([*running, waiting])
        assert again is first and served == running
    running[1].release("the test")
    grow(running[:1])
    batch, served = trees.step([running[0], waiting])
    assert batch is not first and served == [running[0], waiting]


def test_a_batch_is_never_taken_for_another_kind_of_growth():
    """Two lanes at one leaf, a leaf that grew by two, a lane that wants an earlier position."""
    trees = Trees([list(range(1, 40))])
    [left, right] = trees.trees[0].root.fork(2)
    grow([left, right])
    first, _ = trees.step([left, right])
    left.append([1, 2])
    right.append([1])
    second, served = trees.step([left, right])
    assert second is not first and second.num_rows == 3 and served == [right, left]
    grow([left, right])
    third, _ = trees.step([left, right])
    grow([left])
    fourth, _ = trees.step([left, right])  # the right one asks again
    assert fourth is not third and fourth.num_rows == 2 and [span.store for span in fourth.spans] == [True, False]


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize(("max_num_rows", "share"), [(8, 2), (3, 1), (2, 1)])
def test_a_long_prompt_goes_on_beside_decoders_that_would_fill_the_step(max_num_rows, share):
    trees = Trees([[1, 2, 3], list(range(100, 0, -1))], max_num_rows=max_num_rows)
    leaves = trees.trees[0].root.fork(20)
    for i, leaf in enumerate(leaves):
        leaf.append([1 + i])
    waiting = leaves
    while waiting:
        served = trees.step(waiting)[1]
        waiting = [leaf for leaf in waiting if leaf not in served]
    grow(leaves)
    long = trees.trees[1].root
    for step in range(1, 100):
        _, served = trees.step([*leaves, long])
        if long in served:
            break
        assert long.tip.computed == step * share and len(served) == max_num_rows - share
        grow(served)
    assert 99 // share <= step <= 99 // share + 1


def test_a_wide_tree_does_not_keep_the_rows_from_a_later_one():
    trees = Trees([[1, 2, 3], [4, 5, 6]], max_num_rows=8)
    leaves = [branch.append([1 + i]) for i, branch in enumerate(trees.trees[0].root.fork(20))]
    other = trees.trees[1].root
    lengths = []
    for _ in range(12):
        _, served = trees.step([*leaves, other])
        grow(served)
        lengths.append(other.num_tokens)
    assert lengths[-6:] == list(range(lengths[-6], lengths[-6] + 6))


def test_rows_that_prompts_do_not_need_are_left_to_decoders():
    trees = Trees([[1, 2, 3], [4, 5]], max_num_rows=16)
    leaves = trees.trees[0].root.fork(20)
    for i, leaf in enumerate(leaves):
        leaf.append([1 + i])
    trees.step(leaves)
    batch, served = trees.step([*leaves, trees.trees[1].root])
    assert batch.num_rows == 16 and len(served) == 15


def test_a_higher_priority_goes_first_and_the_earlier_of_equal_ones():
    llm = tiny_llm(MODEL, max_num_rows=16)
    ended = []

    async def program(root, name):
        [leaf] = await generate([root], GREEDY)
        ended.append(name)
        return leaf.token_ids

    requests = [
        llm.engine.add(lambda root, i=i: program(root, i), [1 + i] * 40, priority=priority)
        for i, priority in enumerate([0, 0, 5, -3, 5])
    ]
    while llm.engine.requests:
        llm.engine.step()
    assert ended == [2, 4, 0, 1, 3]
    assert [request.result for request in requests] == [greedy(MODEL, [1 + i] * 40, 8) for i in range(5)]
    idle(llm)


def test_a_higher_priority_takes_the_room_of_lower_ones():
    llm = tiny_llm(MODEL, num_kv_slots=160)
    low = [SamplingParams(temperature=0, max_tokens=60)] * 2
    prompts = [[1 + i] * 40 for i in range(2)]
    ended = []

    async def program(root, name, params):
        [leaf] = await generate([root], params)
        ended.append(name)
        return leaf.token_ids

    requests = [llm.engine.add(lambda root, i=i: program(root, i, low[i]), prompt) for i, prompt in enumerate(prompts)]
    for _ in range(6):
        llm.engine.step()
    high = llm.engine.add(lambda root: program(root, "high", GREEDY), list(range(1, 61)), priority=1)
    for _ in range(9):
        llm.engine.step()
    assert ended == ["high"] and high.result == greedy(MODEL, list(range(1, 61)), 8)
    while llm.engine.requests:
        llm.engine.step()
    assert [request.result for request in requests] == [greedy(MODEL, prompt, 60) for prompt in prompts]
    assert llm.engine.scheduler.num_preemptions > 0
    idle(llm)


# ---------------------------------------------------------------------- slots


def test_leaves_that_wait_for_nobody_are_computed_about_once_in_a_small_pool():
    prompt, params = list(range(1, 60)), SamplingParams(n=8, max_tokens=60, ignore_eos=True, seed=3)
    [ample] = tiny_llm(MODEL).generate([prompt], params)
    llm = tiny_llm(MODEL, num_kv_slots=208)
    [starved] = llm.generate([prompt], params)
    assert [branch.token_ids for branch in starved.outputs] == [branch.token_ids for branch in ample.outputs]
    assert starved.tree.usage.rows < 3 * ample.tree.usage.rows
    idle(llm)


def test_a_controller_that_looks_at_all_leaves_gets_all_of_them_in_a_small_pool():
    class Widest:
        """Every leaf goes on; how is decided by all of them together."""

        stopping = SamplingParams(max_tokens=24, ignore_eos=True)

        def step(self, tree, logprobs):
            assert len(tree.leaves) == 5 and {leaf.num_tokens for leaf in tree.leaves} == {tree.depth}
            best = logprobs.topk(5).indices
            return Rows(range(5), [int(best[i, (i + tree.depth) % 5]) for i in range(5)])

    async def program(root):
        return await decode(root.fork(5), Widest())

    llm = tiny_llm(MODEL, num_kv_slots=112)
    [starved], [ample] = (some.run(program, [list(range(1, 40))]) for some in (llm, tiny_llm(MODEL)))
    assert [leaf.token_ids for leaf in starved.value] == [leaf.token_ids for leaf in ample.value]
    assert llm.engine.scheduler.num_preemptions > 20
    for leaf in starved.value[:2]:
        reference = dense_logits(MODEL, leaf.path_tokens).log_softmax(-1)
        exact = sum(float(reference[p - 1, leaf.path_tokens[p]]) for p in range(39, leaf.num_tokens))
        assert leaf.logprob == pytest.approx(exact, abs=1e-3)
    idle(llm)


def test_ended_branches_give_way_to_living_ones_and_can_go_on_later():
    async def program(root):
        ended = await generate(root.fork(6), SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
        again = await generate([branch.fork()[0] for branch in ended], GREEDY)
        return ended, again

    llm = tiny_llm(MODEL, num_kv_slots=96)
    [output] = llm.run(program, [list(range(1, 30))], seed=4)
    ended, again = output.value
    for before, after in zip(ended, again, strict=True):
        assert after.token_ids == before.token_ids + greedy(MODEL, before.path_tokens, 8)
    assert llm.engine.scheduler.num_preemptions > 0
    idle(llm)


def test_who_was_passed_over_robs_nobody():
    """Two lanes at one place, of which the first has rows: the second does not take from those before it."""
    trees = Trees([[1] * 20, [2] * 20, [3] * 20])
    roots = [tree.root for tree in trees.trees]
    trees.step(roots)
    grow(roots)
    lanes = [*trees.lanes(roots), *trees.lanes(roots[2:])]
    tips = {lane: lane.tip() for lane in lanes}
    line = _Line(trees.kv, lanes, tips, trees.trees, Batch())
    line.served.add(line.place(lanes[2]))
    assert not line.give_way(lanes[1], 1)
    assert not line.give_way(lanes[3], 1)
    assert line.give_way(lanes[0], 1) and tips[lanes[1]].computed < 20
    assert tips[lanes[0]].computed == tips[lanes[2]].computed == 20


def test_one_of_two_equal_requests_can_be_aborted():
    """X09: requests are told apart by identity; X11: no memory is set aside for tokens that never come."""
    llm = tiny_llm(MODEL, num_kv_slots=96)
    params = SamplingParams(temperature=0, max_tokens=2**31, stop_token_ids=[greedy(MODEL, [1, 2, 3], 9)[-1]])

    async def program(root):
        [leaf] = await generate([root], params)
        return leaf.token_ids

    first, second = (llm.engine.add(program, [1, 2, 3]) for _ in range(2))
    assert first.id != second.id
    for _ in range(3):
        llm.engine.step()
    llm.engine.abort(first)
    while llm.engine.requests:
        llm.engine.step()
    assert "aborted" in str(first.error)
    assert second.result == greedy(MODEL, [1, 2, 3], len(second.result)) and len(second.result) <= 9
    idle(llm)


# ---------------------------------------------------------------------- one-child chains


def test_a_single_fork_goes_on_in_its_parents_node():
    llm = tiny_llm(MODEL)
    nodes = []

    async def program(root):
        [branch] = root.fork()
        for _ in range(3):
            [branch] = await generate([branch], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            nodes.append([len(node.tokens) for node in llm.engine.kv.forest])
            [branch] = branch.fork()
        [left, right] = root.fork(2)  # the root takes its keys back
        await generate([branch, left.append([3]), right.append([4])], GREEDY)
        return [branch.token_ids, left.token_ids, right.token_ids]

    [output] = llm.run(program, [[1, 2, 3]])
    assert nodes == [[5], [7], [9]]
    first = greedy(MODEL, [1, 2, 3], 14)
    assert output.value[0] == first
    assert output.value[1:] == [[token, *greedy(MODEL, [1, 2, 3, token], 8)] for token in (3, 4)]
    idle(llm)


def test_a_parent_gets_its_keys_back_when_its_last_fork_is_pruned():
    async def program(root):
        [trunk] = root.fork()
        trunk.append([7, 8, 9])
        [left, right] = await generate(trunk.fork(2), SamplingParams(max_tokens=5, ignore_eos=True, seed=2))
        left.prune()
        [deeper] = right.fork()
        await generate([deeper], GREEDY)
        right.prune()
        assert trunk.alive and trunk.tip is not None
        assert sum(len(node.tokens) for node in llm.engine.kv.forest) == 6
        await generate([trunk], GREEDY)
        return trunk.token_ids

    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [[1, 2, 3]], seed=1)
    assert output.value == [7, 8, 9, *greedy(MODEL, [1, 2, 3, 7, 8, 9], 8)]
    idle(llm)


def test_beams_take_about_as_many_slots_as_they_have_tokens():
    class Beams:
        """Eight leaves, of which the first always branches and the last always ends."""

        stopping = SamplingParams(max_tokens=200, ignore_eos=True)

        def step(self, tree, logprobs):
            kv = llm.engine.kv
            most.append((kv.num_slots - kv.pool.num_free, sum(len(node.tokens) for node in kv.forest)))
            best = logprobs.topk(2).indices.tolist()
            if len(tree.leaves) < 8:
                return Rows([0, 0, *range(1, len(tree.leaves))], [best[0][1], *(leaf[0] for leaf in best)])
            return Rows([0, 0, *range(1, 7)], [best[0][1], *(leaf[0] for leaf in best[:7])])

    async def program(root):
        return await decode(root.fork(), Beams())

    most: list[tuple[int, int]] = []
    llm = tiny_llm(MODEL)
    [output] = llm.run(program, [list(range(1, 90))])
    assert len(output.value) == 8
    slots, tokens = most[-1]
    assert slots <= tokens + 16 * 16, "each of 8 leaves and of 7 forks wastes less than a page"
    for leaf in output.value[::3]:
        reference = dense_logits(MODEL, leaf.path_tokens).log_softmax(-1)
        exact = sum(float(reference[p - 1, leaf.path_tokens[p]]) for p in range(89, leaf.num_tokens))
        assert leaf.logprob == pytest.approx(exact, abs=1e-2)
    idle(llm)


# ---------------------------------------------------------------------- the prefix cache between requests


def test_the_cache_says_what_it_was_asked_for_and_what_it_had():
    llm = tiny_llm(MODEL)
    llm.generate([[1, 2, 3, 4]], GREEDY)
    llm.generate([[1, 2, 9]], GREEDY)
    llm.generate([[8, 8]], GREEDY)
    statistics = llm.cache_statistics
    assert (statistics.queries, statistics.hits) == (3, 1)
    assert (statistics.query_tokens, statistics.hit_tokens, statistics.evicted_tokens) == (9, 2, 0)
    llm.engine.kv.clear_cache()
    assert llm.cache_statistics.evicted_tokens > 0 and statistics.evicted_tokens == 0


def test_the_prefix_that_was_used_last_is_evicted_last():
    llm = tiny_llm(MODEL, num_kv_slots=176, page_size=16)
    one = SamplingParams(temperature=0, max_tokens=1)
    first, second, third = ([i, *range(50, 95)] for i in (1, 2, 3))
    for prompt in (first, second, third, first):
        llm.generate([prompt], one)
    llm.generate([[4] * 40], one)  # does not fit beside all of them

    def cached(prompt):
        return llm.engine.kv.forest.match(prompt)[2]

    assert (cached(first), cached(second)) == (46, 0)
    idle(llm)


def test_namespaces_share_no_prefix():
    llm = tiny_llm(MODEL)
    prompt = list(range(1, 50))
    for namespace, cached in (("a", 0), ("b", 0), ("a", 49), ("", 0)):
        [output] = llm.generate([prompt], GREEDY, namespace=namespace)
        assert output.tree.usage.cached_tokens == cached
        assert output.outputs[0].token_ids == greedy(MODEL, prompt, 8)
    both = llm.generate([prompt, prompt, prompt], GREEDY, namespace=["c", "c", "d"])
    assert [output.outputs[0].token_ids for output in both] == [greedy(MODEL, prompt, 8)] * 3
    assert len(llm.engine.kv.forest.roots) == 5
    idle(llm)


def test_bad_priorities_and_namespaces_are_refused_by_name():
    llm = tiny_llm(MODEL)
    for options, message in (
        ({"priority": 1.5}, "priority: 1.5 is not of type int"),
        ({"priority": [1, 2]}, "priority: 2 for 1 prompts; give one, or one each"),
        ({"priority": True}, "priority must be an integer, not True"),
        ({"namespace": 7}, "namespace: 7 is not of type str"),
        ({"namespace": ["a", 7]}, "namespace: 7 is not of type str"),
    ):
        with pytest.raises(ValueError, match=message):
            llm.generate([[1, 2]], GREEDY, **options)
    with pytest.raises(ValueError, match="namespace: 7 is not a text"):
        llm.engine.add(lambda root: None, [1], namespace=7)
    idle(llm)

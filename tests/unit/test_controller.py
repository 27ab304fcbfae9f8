"""Sampling, greedy and hand-written controllers on a made-up model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from language_model import grow, random_model

from treewise.config import SamplingParams
from treewise.controller import Greedy, Leaf, Rows, Sample, TreeView
from treewise.sampler import SamplingRow, log_probs, row_key, sample

MODEL = random_model(17)


class BranchEvery:
    """Every `every`-th step each leaf branches into its two most likely tokens."""

    def __init__(self, every: int, max_tokens: int) -> None:
        self.every, self.stopping = every, SamplingParams(max_tokens=max_tokens)

    def step(self, tree: TreeView, logprobs: torch.Tensor) -> Rows:
        into = 2 if tree.depth % self.every == self.every - 1 else 1
        tokens = logprobs.topk(into).indices.flatten()
        return Rows(parent=torch.arange(len(tree.leaves)).repeat_interleave(into), token=tokens)


def test_user_controller_branches_every_third_step():
    finished, live = grow(MODEL, BranchEvery(3, max_tokens=10), [1, 2])
    assert not live
    assert len(finished) == 2**3
    assert len({tuple(leaf.tokens) for leaf in finished}) == 8
    assert [leaf.path[1:] for leaf in finished] == [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    for leaf in finished:  # between branchings every token is the most likely one
        for place, token in enumerate(leaf.tokens):
            best = MODEL([1, 2, *leaf.tokens[:place]]).topk(2).indices.tolist()
            assert token in (best if place % 3 == 2 else best[:1])


def test_greedy_takes_the_most_likely_token_until_end_of_text():
    [leaf], live = grow(MODEL, Greedy(), [1, 2], eos=[5, 6])
    assert not live
    assert leaf.tokens[-1] in (5, 6)
    for place, token in enumerate(leaf.tokens):
        assert token == int(MODEL([1, 2, *leaf.tokens[:place]]).argmax())


def test_sample_at_temperature_zero_is_greedy():
    greedy, _ = grow(MODEL, Greedy(SamplingParams(max_tokens=12)), [3])
    sampled, _ = grow(MODEL, Sample(SamplingParams(temperature=0, max_tokens=12)), [3])
    assert greedy[0].tokens == sampled[0].tokens


def test_siblings_are_distinct_and_reproducible_and_alone_as_in_a_crowd():
    controller = Sample(SamplingParams(max_tokens=16))
    crowd, _ = grow(MODEL, controller, [3], num_roots=4, seed=42)
    again, _ = grow(MODEL, controller, [3], num_roots=4, seed=42)
    alone, _ = grow(MODEL, controller, [3], num_roots=1, seed=42)
    other, _ = grow(MODEL, controller, [3], num_roots=4, seed=43)
    assert [leaf.tokens for leaf in crowd] == [leaf.tokens for leaf in again]
    assert alone[0].tokens == crowd[0].tokens
    assert len({tuple(leaf.tokens) for leaf in crowd + other}) == 8


def test_min_tokens_and_stop_token_ids():
    params = SamplingParams(max_tokens=30, min_tokens=5, stop_token_ids=[0, 1, 2, 3, 4])
    finished, _ = grow(MODEL, Sample(params), [3], num_roots=6, eos=[5, 6])
    ends = {0, 1, 2, 3, 4, 5, 6}
    for leaf in finished:
        assert leaf.num_tokens > 5
        assert not ends & set(leaf.tokens[:5])
    assert any(leaf.tokens[-1] in ends for leaf in finished)


def test_none_leaves_the_leaves_alive():
    class Never:
        stopping = SamplingParams()

        def step(self, tree, logprobs):
            return None

    finished, live = grow(MODEL, Never(), [3], num_roots=2)
    assert not finished
    assert [leaf.num_tokens for leaf in live] == [0, 0]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_rows_of_any_kind_become_arrays(kind):
    parents, tokens = Rows(kind([0, 0, 2]), kind([4, 5, 6])).arrays(3, 7)
    assert (parents.tolist(), tokens.tolist()) == ([0, 0, 2], [4, 5, 6])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Rows([0, 3], [1, 1]), r"Rows.parent must be in \[0, 2\], not 3"),
        (Rows([0, -1], [1, 1]), r"Rows.parent must be in \[0, 2\], not -1"),
        (Rows([0, 1], [1, 7]), r"Rows.token must be in \[0, 6\], not 7"),
        (Rows([0, 1], [1]), "equally long"),
    ],
)
def test_wrong_rows_are_refused_by_name(rows, message):
    with pytest.raises(ValueError, match=message):
        rows.arrays(3, 7)


def test_position_of_the_random_stream_counts_the_whole_path():
    params, logits = SamplingParams(), torch.zeros(1, 5000)
    leaf = Leaf(tokens=[1, 2, 3], prompt_tokens=[4, 5], num_tokens=1, key=row_key(0, ()))
    drawn = Sample(params).step(TreeView([leaf], logits), log_probs(logits))
    assert drawn.token.tolist() == sample(logits, [SamplingRow(params, leaf.key, position=5)]).tolist()

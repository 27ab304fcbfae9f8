"""The offline cache: dense, it is the model; compressed, it is attention over what was kept, at true positions."""

import numpy as np
import pytest
import torch
from tiny import dense_logits, greedy, tiny_llm, tiny_model

from treewise import SamplingParams
from treewise.evaluate.cache import NOWHERE, POSITION_BYTES, ROWS, Held, OfflineCache, attend, read_together
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.scorers import SnapKV


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(1, 128, length).tolist()


def cached(model, tokens):
    cache = OfflineCache(model)
    cache.read(tokens)
    return cache


@pytest.mark.parametrize("windows", [(None, None), (8, None)])
def test_a_dense_cache_is_the_model(windows):
    model = tiny_model(windows=windows)
    tokens = prompt(ROWS + 40)
    cache = OfflineCache(model)
    hidden = torch.cat([cache.read(tokens[:-20]), cache.read(tokens[-20:])])
    torch.testing.assert_close(model.logits(hidden), dense_logits(model, tokens), rtol=0, atol=1e-4)
    assert cache.tokens == tokens and cache.length == len(tokens)


def test_it_decodes_what_the_engine_decodes():
    model = tiny_model()
    tokens = prompt(50)
    continuation = cached(model, tokens).greedy(12)
    [output] = tiny_llm(tiny_model()).generate([tokens], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert continuation == output.outputs[0].token_ids
    expected = greedy(model, tokens, 12)
    assert continuation[: len(expected)] == expected


def test_sequences_side_by_side_are_sequences_alone():
    model = tiny_model()
    alone = [cached(model, prompt(30, seed)) for seed in (1, 2)]
    together = [cache.copy() for cache in alone]
    texts = [prompt(5, 3), prompt(9, 4)]
    for rows, cache, text in zip(read_together(together, texts), alone, texts, strict=True):
        torch.testing.assert_close(rows, cache.read(text), rtol=0, atol=1e-5)
    assert [cache.length for cache in together] == [35, 39]


def test_a_copy_goes_on_by_itself():
    cache = cached(tiny_model(), prompt(20))
    other = cache.copy()
    other.read(prompt(5))
    assert cache.length == 20 and all(held.keys.shape[1] == 20 for held in cache.held)
    assert [len(rows) for rows in cache.asked] == [1, 1]


@pytest.mark.parametrize("name", ["full", "snapkv", "pyramidkv", "novita", "adakv"])
def test_a_budget_of_the_whole_prompt_changes_no_bit(name):
    model = tiny_model(windows=(None,) * 4)
    cache = cached(model, prompt(60))
    small = cache.compress(KVSparsity.named(name, budget=60))
    assert torch.equal(small.read(prompt(8)), cache.copy().read(prompt(8)))
    assert small.num_bytes() == cache.num_bytes() + 8 * 4 * 2 * 2 * 8 * 2


def reference(queries, positions, keys, values, key_positions, scale, soft_cap, window):
    """Attention of [rows, heads, dim] in float64, a KV head's tokens being lists of their own."""
    rows, heads, _ = queries.shape
    group = heads // len(keys)
    outputs, lses = np.zeros(queries.shape), np.zeros((rows, heads))
    for row in range(rows):
        for head in range(heads):
            own = head // group
            distance = positions[row] - key_positions[own]
            seen = (distance >= 0) & (distance < window)
            scores = keys[own][seen].astype(np.float64) @ queries[row, head] * scale
            if soft_cap:
                scores = np.tanh(scores / soft_cap) * soft_cap
            lses[row, head] = np.log(np.exp(scores).sum())
            outputs[row, head] = np.exp(scores - lses[row, head]) @ values[own][seen]
    return outputs, lses


@pytest.mark.parametrize(("soft_cap", "window"), [(None, None), (2.0, None), (None, 20)])
def test_heads_that_hold_different_tokens_attend_to_their_own(soft_cap, window):
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(2, 30, 8, generator=generator) for _ in range(2))
    queries = torch.randn(3, 6, 8, generator=generator)
    positions = torch.tensor([27, 28, 40])
    whole = Held(keys, values, torch.arange(30).expand(2, -1))
    kept = [torch.tensor([0, 3, 5, 22, 28]), torch.tensor([1, 21, 25])]
    held = whole.only(kept)
    assert held.num_tokens == 8 and held.positions[1].tolist() == [1, 21, 25, NOWHERE, NOWHERE]
    got = attend(queries, positions, held, scale=0.7, soft_cap=soft_cap, window=window)
    own = [[part[head, indices].numpy() for head, indices in enumerate(kept)] for part in (keys, values)]
    outputs, lse = reference(
        queries.numpy(), positions.numpy(), *own, [indices.numpy() for indices in kept], 0.7, soft_cap, window or 1000
    )
    np.testing.assert_allclose(got.outputs, outputs, atol=1e-5)
    np.testing.assert_allclose(got.lse, lse, atol=1e-5)


def test_new_tokens_keep_their_true_positions():
    model = tiny_model()
    tokens = prompt(40)
    small = cached(model, tokens).compress(KVSparsity(budget=10, window=4, sinks=2))
    small.read([5, 6])
    assert small.held[0].keys.shape[1] == 12
    assert small.held[0].positions[:, -2:].tolist() == [[40, 41]] * 2
    # A layer's own keys do not depend on what it has evicted, but on where its tokens stand.
    torch.testing.assert_close(small.held[0].keys[:, -2:], cached(model, [*tokens, 5, 6]).held[0].keys[:, -2:])


def test_layers_with_a_window_of_their_own_are_left_alone():
    cache = cached(tiny_model(windows=(8, None, 8, None)), prompt(40))
    policy = KVSparsity(allocator="pyramid", budget=16, window=4, sinks=2)
    small = cache.compress(policy)
    counts = [held.keys.shape[1] for held in small.held]
    assert counts[::2] == [40, 40] and counts[1::2] == policy.budgets(40, 2)
    assert [cache.evidence(layer, 4).layer for layer in (1, 3)] == [0, 1]


def test_bytes_are_those_of_what_is_held_and_where_it_stands():
    model = tiny_model(windows=(None,) * 3)
    cache = cached(model, prompt(50))
    assert cache.num_bytes() == 3 * 50 * 2 * 2 * 8 * 2 and cache.num_bytes(4) == 2 * cache.num_bytes()
    policy = KVSparsity(allocator="ada", budget=20, window=4, sinks=2, first_full=1)
    small = cache.compress(policy)
    assert small.num_bytes() == 50 * 2 * 2 * 8 * 2 + 2 * 20 * 2 * (2 * 8 * 2 + POSITION_BYTES)
    assert len({int((row != NOWHERE).sum()) for held in small.held[1:] for row in held.positions}) > 1


def test_evidence_shares_out_each_query_once():
    cache = cached(tiny_model(), prompt(ROWS + 30))
    evidence = cache.evidence(1, None)
    assert len(evidence.queries) == ROWS + 30 and evidence.query_positions.tolist() == list(range(ROWS + 30))
    assert float(evidence.attention(reduce="sum").sum()) == pytest.approx(6 * (ROWS + 30), rel=1e-4)
    last = cache.evidence(1, 5)
    assert last.query_positions.tolist() == list(range(ROWS + 25, ROWS + 30))
    assert torch.equal(last.queries, evidence.queries[-5:])


def test_a_continuation_judges_the_prompt_by_all_that_it_has_seen():
    model = tiny_model()
    path = cached(model, prompt(40))
    path.read(prompt(6, 1))
    evidence = path.evidence(0, 6, tokens=40)
    assert len(evidence.keys) == 40 and evidence.query_positions.tolist() == list(range(40, 46))
    whole = path.evidence(0, 6)
    torch.testing.assert_close(evidence.attention(), whole.attention()[:, :40])
    assert float(evidence.attention(reduce="sum").sum()) < 6 * 6 - 0.1
    chosen = path.choose(KVSparsity(SnapKV(6, kernel_size=1), budget=12, window=2, sinks=1), 40)
    for kept, scores in zip(chosen[0], evidence.attention(), strict=True):
        inside = sorted(scores[1:38].topk(9).indices + 1)
        assert kept.tolist() == [0, *map(int, inside), 38, 39]


def test_a_policy_that_the_model_cannot_have_is_refused():
    cache = cached(tiny_model(), prompt(40))
    with pytest.raises(ValueError, match="policy: first_full must be less than the 2 layers"):
        cache.choose(KVSparsity.named("novita", budget=38))


def test_a_cache_without_its_last_tokens_is_as_it_was_before():
    cache = OfflineCache(tiny_model())
    cache.read(list(range(1, 30)))
    longer = cache.copy()
    longer.read([3, 1, 4])
    shorter = longer.without(3)
    assert shorter.tokens == cache.tokens and longer.length == 32
    torch.testing.assert_close(shorter.read([5, 9]), cache.read([5, 9]))

"""Beam search: against brute force, and against Transformers on a small random Llama."""

from __future__ import annotations

import itertools

import pytest
import torch
from language_model import Letters, grow, random_model
from tiny import tiny_llm

from treewise import decode
from treewise.config import BeamSearchParams
from treewise.controller import BeamSearch, Leaf, TreeView

PROMPT = [1, 2, 3]


def search(model, params, prompt=PROMPT, **options):
    controller = BeamSearch(params)
    finished, live = grow(model, controller, prompt, **options)
    assert not live
    found = [(leaf.tokens, controller.score(leaf.logprob, leaf.num_tokens)) for leaf in finished]
    return sorted(found, key=lambda pair: -pair[1])[: params.beam_width]


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.7, 2.0])
def test_a_wide_enough_beam_finds_what_brute_force_finds(length_penalty):
    vocab, depth, eos = 4, 4, 0
    model = random_model(vocab, scale=1.0)
    every = []
    for length in range(1, depth + 1):
        for tokens in itertools.product(range(vocab), repeat=length):
            if eos in tokens[:-1] or (length < depth and tokens[-1] != eos):
                continue
            logprob = sum(float(model([*PROMPT, *tokens[:i]]).log_softmax(-1)[token]) for i, token in enumerate(tokens))
            every.append((list(tokens), logprob / length**length_penalty))
    every.sort(key=lambda pair: -pair[1])
    width = vocab**depth
    params = BeamSearchParams(width, max_tokens=depth, length_penalty=length_penalty, early_stopping="never")
    found = search(model, params, eos=[eos])
    assert len(found) == len(every)
    assert [tokens for tokens, _ in found[:20]] == [tokens for tokens, _ in every[:20]]
    assert [score for _, score in found] == pytest.approx([score for _, score in every], abs=1e-5)


def test_width_one_is_greedy():
    model = random_model(30)
    [(tokens, _)] = search(model, BeamSearchParams(1, max_tokens=8))
    for place, token in enumerate(tokens):
        assert token == int(model([*PROMPT, *tokens[:place]]).argmax())


def test_hypotheses_are_distinct_even_from_identical_branches():
    for num_roots in (1, 3):
        found = search(random_model(12), BeamSearchParams(5, max_tokens=6), eos=[0], num_roots=num_roots)
        assert len(found) == 5
        assert len({tuple(tokens) for tokens, _ in found}) == 5


def test_stop_strings_and_min_tokens_end_hypotheses():
    tokenizer = Letters("abcdefgh")
    model = random_model(8, scale=1.0)
    params = BeamSearchParams(4, max_tokens=10, stop=["ab", "c"], min_tokens=0, length_penalty=0.5)
    found = search(model, params, tokenizer=tokenizer)
    texts = [tokenizer.decode(tokens) for tokens, _ in found]
    assert any(text.endswith(("ab", "c")) for text in texts)
    for text in texts:
        assert text.endswith(("ab", "c")) or len(text) == 10
        assert "ab" not in text[:-1]
        assert "c" not in text[:-1]
    for tokens, _ in search(model, BeamSearchParams(4, max_tokens=10, min_tokens=4), eos=[0, 1]):
        assert not {0, 1} & set(tokens[:4])


def test_nothing_to_improve_prunes_every_beam():
    controller = BeamSearch(BeamSearchParams(1, early_stopping=True))
    done = Leaf(logprob=-0.1, num_tokens=1)
    view = TreeView([Leaf(logprob=-9.0, num_tokens=1)], torch.zeros(1, 5), 1, [done], frozenset([0]))
    rows = controller.step(view, torch.zeros(1, 5).log_softmax(-1))
    assert [len(column) for column in rows.arrays(1, 5)] == [0, 0]


def tiny_llama(vocab_size, seed):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llama():
    network = tiny_llama(vocab_size=24, seed=1)
    known = {}

    @torch.inference_mode()
    def model(tokens):
        tokens = tuple(tokens)
        if tokens not in known:
            known[tokens] = network(torch.tensor([tokens])).logits[0, -1].float()
        return known[tokens]

    return network, model


def transformers_beams(network, prompt, eos, params, min_tokens=0):
    output = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        min_new_tokens=min_tokens or None,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0 if eos else None,
        output_scores=True,
        return_dict_in_generate=True,
    )
    beams = []
    for sequence, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :]
        ends = [place for place, token in enumerate(tokens) if token in eos]
        beams.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return beams


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.6, 1.0, 2.0])
def test_beams_equal_transformers(llama, length_penalty, early_stopping):
    network, model = llama
    lengths = set()
    for eos, width, prompt in itertools.product(([], [7], list(range(1, 24, 2))), (2, 4, 5), ([1, 2, 3], [9, 4], [16])):
        params = BeamSearchParams(width, max_tokens=9, length_penalty=length_penalty, early_stopping=early_stopping)
        expected = transformers_beams(network, prompt, eos, params)
        found = search(model, params, prompt, eos=eos)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)
        lengths |= {len(tokens) for tokens, _ in found}
    assert len(lengths) > 1  # texts end early as well as at the limit


def test_min_tokens_equal_transformers(llama):
    network, model = llama
    params = BeamSearchParams(4, max_tokens=8, min_tokens=5)
    expected = transformers_beams(network, PROMPT, [3, 11, 19], params, min_tokens=5)
    found = search(model, params, eos=[3, 11, 19])
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-5)


def test_scores():
    assert BeamSearch(BeamSearchParams(2)).score(-3.0, 3) == -1.0
    assert BeamSearch(BeamSearchParams(2, length_penalty=-2.0)).score(-3.0, 2) == -12.0
    assert BeamSearch(BeamSearchParams(2)).score(0.0, 0) == 0.0  # there was no room for a token


class Wary(BeamSearch):
    """A beam search that keeps out a token."""

    def step(self, tree, logprobs):
        assert torch.allclose(logprobs.exp().sum(dim=-1), torch.ones(len(tree.leaves)))
        logprobs = logprobs.clone()
        logprobs[:, 120] = -torch.inf
        return super().step(tree, logprobs)


def test_a_step_of_ones_own_gets_all_log_probs():
    params = BeamSearchParams(4, max_tokens=5)
    assert BeamSearch(params).ranks and not Wary(params).ranks

    def found(controller):
        async def program(root):
            return [leaf.token_ids for leaf in await decode([root], controller)]

        [output] = tiny_llm().run(program, [[7, 8, 9]])
        return output.value

    plain, wary = found(BeamSearch(params)), found(Wary(params))
    assert any(120 in tokens for tokens in plain)
    assert not any(120 in tokens for tokens in wary)

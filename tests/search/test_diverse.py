"""Diverse beam search: against a plain search over lists, and what the groups keep apart."""

from __future__ import annotations

import itertools
import math

import pytest
from language_model import grow, random_model
from tiny import dense_logits, tiny_llm, tiny_model

from treewise.config import BeamSearchParams
from treewise.search.diverse import DiverseBeamSearch

PROMPT = [1, 2, 3]


def search(model, params, eos=()):
    controller = DiverseBeamSearch(params, [(group,) for group in range(params.num_beam_groups)])
    finished, live = grow(model, controller, PROMPT, eos=eos, num_roots=params.num_beam_groups)
    assert not live
    columns = zip(*((leaf.path, leaf.tokens, leaf.logprob, leaf.num_tokens) for leaf in finished), strict=True)
    scores = controller.scores(*columns)
    return [(finished[i].tokens, scores[i]) for i in controller.best([leaf.path for leaf in finished], scores)]


def plain_search(model, params, eos=()):
    """Group beam search over lists, by the rules of Transformers up to 4.56; a group stops when it has enough."""
    width = params.beam_width // params.num_beam_groups
    live = [[((), 0.0)] for _ in range(params.num_beam_groups)]
    done = [[] for _ in live]
    for length in range(1, params.max_tokens + 1):
        chosen_before = []
        for group, beams in enumerate(live):
            scores = {}
            for tokens, total in beams:
                for token, logprob in enumerate(model([*PROMPT, *tokens]).log_softmax(-1).tolist()):
                    penalty = params.diversity_penalty * chosen_before.count(token)
                    scores[*tokens, token] = total + logprob - penalty
            best = sorted(scores.items(), key=lambda pair: -pair[1])[: max(2, 1 + len(eos)) * width]
            going = [(tokens, total) for tokens, total in best if tokens[-1] not in eos][:width]
            ended = [(tokens, total) for tokens, total in best[:width] if tokens[-1] in eos]
            if length == params.max_tokens:
                ended += going
            done[group] += [(list(tokens), total / length**params.length_penalty) for tokens, total in ended]
            done[group] = sorted(done[group], key=lambda pair: -pair[1])[:width]
            chosen_before += [tokens[-1] for tokens, _ in going]
            live[group] = [] if len(done[group]) == width else going
    return sorted((hypothesis for group in done for hypothesis in group), key=lambda pair: -pair[1])


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("eos", [(), (5,), (2, 7, 11), (1, 2, 3, 4)])
def test_groups_find_what_a_search_over_lists_finds(length_penalty, eos):
    kinds = set()
    for (width, groups), penalty, seed in itertools.product(((4, 2), (6, 3), (3, 3)), (0.0, 0.4, 3.0), (2, 3, 4)):
        model = random_model(14, order=seed, scale=1.5)
        params = BeamSearchParams(
            width,
            max_tokens=6,
            length_penalty=length_penalty,
            early_stopping=True,
            num_beam_groups=groups,
            diversity_penalty=penalty,
        )
        found, expected = search(model, params, eos), plain_search(model, params, eos)
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-4)
        assert sorted(tokens for tokens, _ in found) == sorted(tokens for tokens, _ in expected)
        kinds |= {len(tokens) for tokens, _ in found}
    assert len(kinds) > 1 or not eos


def test_without_a_penalty_all_groups_are_one_search():
    model = random_model(14)
    found = search(model, BeamSearchParams(6, max_tokens=5, num_beam_groups=3))
    alone = search(model, BeamSearchParams(2, max_tokens=5))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in alone for _ in range(3)]


def test_a_high_penalty_keeps_the_groups_apart():
    params = BeamSearchParams(4, max_tokens=5, num_beam_groups=4, diversity_penalty=1000, ignore_eos=True)
    [output] = tiny_llm().beam_search(["two plus two"], params)
    texts = [completion.token_ids for completion in output.outputs]
    assert len(texts) == 4
    assert all(len(set(place)) == 4 for place in zip(*texts, strict=True))


def test_the_best_of_all_groups_come_back_with_scores_and_log_probs():
    model = tiny_model()
    options = {"max_tokens": 5, "num_beam_groups": 2, "diversity_penalty": 0.5, "ignore_eos": True}
    llm = tiny_llm(model)
    [every] = llm.beam_search(["two plus two"], BeamSearchParams(6, **options))
    params = BeamSearchParams(6, num_return_sequences=2, logprobs=3, **options)
    [some] = llm.beam_search(["two plus two"], params)
    assert [one.token_ids for one in some.outputs] == [one.token_ids for one in every.outputs[:2]]
    scores = [one.score for one in every.outputs]
    assert scores == sorted(scores, reverse=True)
    for one in some.outputs:
        assert one.score <= one.cumulative_logprob / 5 + 1e-6
        alone = dense_logits(model, some.prompt_token_ids + one.token_ids).log_softmax(-1)[-6:-1]
        own = [place[token].logprob for place, token in zip(one.logprobs, one.token_ids, strict=True)]
        expected = [float(row[token]) for row, token in zip(alone, one.token_ids, strict=True)]
        assert own == pytest.approx(expected, abs=1e-4)
        assert math.fsum(own) == pytest.approx(one.cumulative_logprob, abs=1e-4)
        assert all(3 <= len(place) <= 4 for place in one.logprobs)
    assert sum(node.state == "finished" for node in some.tree.nodes) == 2

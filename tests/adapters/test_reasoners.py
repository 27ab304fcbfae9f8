"""llm-reasoners over a tiny engine; skipped where it is not installed."""

import numpy as np
import pytest
from tiny import dense_logits, greedy, idle, tiny_llm, tiny_model

pytest.importorskip("reasoners", reason="needs llm-reasoners: pip install 'treewise[reasoners]'")

from treewise.adapters.reasoners import TreewiseModel

PROMPT = "Q: 2 + 3 = ?\nA:"


@pytest.fixture
def model():
    return TreewiseModel(tiny_llm(), max_new_tokens=10)


def text_of(tokens):
    return bytes(token for token in tokens if token).decode("utf-8", "replace")


def test_answers_are_greedy_unless_told_otherwise(model):
    tokens = greedy(tiny_model(), list(PROMPT.encode()), 10)
    out = model.generate([PROMPT, "Hi"], output_log_probs=True)
    assert out.text == [text_of(tokens), text_of(greedy(tiny_model(), list(b"Hi"), 10))]
    logits = dense_logits(tiny_model(), [*PROMPT.encode(), *tokens])[len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).max(-1).values
    np.testing.assert_allclose(out.log_prob[0], expected.numpy(), atol=1e-4)
    assert model.generate([PROMPT], hide_input=False).text == [PROMPT + out.text[0]]
    idle(model.llm)


def test_an_answer_ends_with_the_text_or_token_that_ends_it(model):
    tokens = greedy(tiny_model(), list(PROMPT.encode()), 10)
    for end in (text_of(tokens)[2], tokens[2], [tokens[2], "none"]):
        assert model.generate([PROMPT], eos_token_id=end).text == [text_of(tokens[: tokens.index(tokens[2]) + 1])]
    assert model.generate([PROMPT], max_new_tokens=3).text == [text_of(tokens[:3])]
    assert TreewiseModel(tiny_llm()).generate([PROMPT], max_length=len(PROMPT) + 4).text == [text_of(tokens[:4])]


def test_sequences_of_an_input_stand_side_by_side(model):
    drawn = model.generate([PROMPT, "Hi"], do_sample=True, num_return_sequences=3)
    assert len(drawn.text) == 6
    assert len(set(drawn.text)) > 2
    assert drawn.log_prob is None


def test_logits_of_candidates_are_the_models(model):
    prompts = [PROMPT, "Hi"]
    candidates = ["5", "6", "Y"]
    expected = [dense_logits(tiny_model(), list(text.encode()))[-1][list(b"56Y")] for text in prompts]
    for row, logits in zip(model.get_next_token_logits(prompts, candidates), expected, strict=True):
        np.testing.assert_allclose(row, logits.numpy(), atol=1e-4)
    [row] = model.get_next_token_logits(PROMPT, candidates, postprocess="softmax")
    np.testing.assert_allclose(row, expected[0].softmax(-1).numpy(), atol=1e-4)
    idle(model.llm)


def test_loglikelihoods_leave_the_prefix_out(model):
    contents = [PROMPT + " 5", PROMPT + " six", PROMPT]
    expected = []
    for text in contents:
        tokens = list(text.encode())
        logprobs = dense_logits(tiny_model(), tokens).log_softmax(-1)
        expected.append(sum(float(logprobs[i - 1, tokens[i]]) for i in range(len(PROMPT), len(tokens))))
    np.testing.assert_allclose(model.get_loglikelihood(PROMPT, contents), expected, atol=1e-3)


def test_errors_name_what_is_wrong(model):
    with pytest.raises(ValueError, match="stopping_criteria, typical_p: not supported"):
        model.generate([PROMPT], stopping_criteria=[], typical_p=0.9)
    with pytest.raises(ValueError, match="candidates: 'no' is 2 tokens"):
        model.get_next_token_logits(PROMPT, ["no"])
    with pytest.raises(ValueError, match="postprocess is 'max'; choose one of None, softmax"):
        model.get_next_token_logits(PROMPT, ["n"], postprocess="max")
    with pytest.raises(ValueError, match="candidates: 1 lists for 2 prompts"):
        model.get_next_token_logits([PROMPT, "Hi"], [["n"]])
    with pytest.raises(ValueError, match="do not begin with those of the prefix"):
        model.get_loglikelihood(PROMPT, ["Hi"])

"""lm-eval over a tiny engine; skipped where lm-eval is not installed, but for the scores that it is told."""

from types import SimpleNamespace

import pytest
import torch
from tiny import dense_logits, greedy, idle, tiny_llm, tiny_model

from treewise.adapters.scoring import score_continuations

CONTEXTS = ["Q: 1 + 1 =", "Q: 1 + 2 =", "Hello"]
CHOICES = [" 2", " 3", " four"]


def dense_score(model, context, continuation):
    """Return log-probability and greediness, from one sequence alone."""
    logprobs = dense_logits(model, [*context, *continuation])[len(context) - 1 : -1].log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(list(continuation))[:, None])
    return float(own.sum()), logprobs.argmax(-1).tolist() == list(continuation)


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


@pytest.fixture
def lm():
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
    from treewise.adapters.lm_eval import TreewiseLM

    return TreewiseLM(tiny_llm())


def test_scores_are_those_of_each_sequence_alone():
    llm, model = tiny_llm(), tiny_model()
    pairs = [(context.encode(), choice.encode()) for context in CONTEXTS for choice in CHOICES]
    likely = greedy(model, list(CONTEXTS[0].encode()), 3)
    pairs.insert(4, (CONTEXTS[0].encode(), likely))
    pairs.append((b"Hello", b""))
    scored = score_continuations(llm, [(list(context), list(rest)) for context, rest in pairs])
    for (context, rest), one in zip(pairs[:-1], scored, strict=False):
        logprob, is_greedy = dense_score(model, context, rest)
        assert one.logprob == pytest.approx(logprob, abs=1e-3)
        assert one.greedy == is_greedy
    assert scored[4].greedy
    assert scored[-1] == (0.0, True)
    assert llm.cache_statistics.queries == len(CONTEXTS)  # a tree each
    idle(llm)


def test_pairs_that_cannot_be_scored_are_named():
    with pytest.raises(ValueError, match=r"pairs\[1\]: the context is empty"):
        score_continuations(tiny_llm(), [([1], [2]), ([], [2])])
    with pytest.raises(ValueError, match=r"pairs\[0\]: 9 tokens are more than max_model_len=8"):
        score_continuations(tiny_llm(max_model_len=8), [([1] * 5, [2] * 4)])


def test_loglikelihoods_come_in_the_order_of_the_requests(lm):
    asked = [(context, choice) for choice in CHOICES for context in [*CONTEXTS, ""]]
    for (context, choice), (logprob, is_greedy) in zip(asked, lm.loglikelihood(requests(*asked)), strict=True):
        expected = dense_score(tiny_model(), context.encode() or bytes([0]), choice.encode())
        assert (pytest.approx(expected[0], abs=1e-3), expected[1]) == (logprob, is_greedy)
    idle(lm.llm)


def test_a_context_that_is_too_long_loses_its_beginning():
    pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
    from treewise.adapters.lm_eval import TreewiseLM

    lm = TreewiseLM(tiny_llm(max_model_len=12))
    [(logprob, _)] = lm.loglikelihood(requests(("abcdefghijklmnop", " yes")))
    assert logprob == pytest.approx(dense_score(tiny_model(), b"ijklmnop", b" yes")[0], abs=1e-3)


def test_a_rolling_loglikelihood_predicts_each_token_once(lm):
    text = "A text that fits."
    assert lm.loglikelihood_rolling(requests((text,), ("",))) == [
        pytest.approx(dense_score(tiny_model(), bytes([0]), text.encode())[0], abs=1e-3),
        0.0,
    ]
    short = type(lm)(tiny_llm(max_model_len=9))
    [value] = short.loglikelihood_rolling(requests((text[:12],)))
    first = dense_score(tiny_model(), bytes([0]), text[:8].encode())[0]
    second = dense_score(tiny_model(), text[3:8].encode(), text[8:12].encode())[0]
    assert value == pytest.approx(first + second, abs=1e-3)


def test_generation_stops_where_it_is_told(lm):
    model = tiny_model()
    expected = bytes(token for token in greedy(model, list(b"Say: "), 12) if token).decode("utf-8", "replace")
    [text, cut] = lm.generate_until(
        requests(
            ("Say: ", {"until": [], "max_gen_toks": 12, "do_sample": False}),
            ("Say: ", {"until": [expected[3]], "max_gen_toks": 12}),
        )
    )
    assert text == expected
    assert cut == expected[: expected.index(expected[3])]
    with pytest.raises(ValueError, match="max_gen_toks: 512 leaves no room"):
        lm.generate_until(requests(("Say: ", {"max_gen_toks": 512})))


def test_the_harness_finds_the_model_and_runs_a_task(tmp_path):
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install 'treewise[eval]'")
    datasets = pytest.importorskip("datasets")
    from lm_eval.api.registry import get_model
    from lm_eval.api.task import ConfigurableTask

    from treewise.adapters.lm_eval import TreewiseLM

    assert get_model("treewise") is TreewiseLM
    rows = {"question": CONTEXTS, "choices": [CHOICES] * 3, "answer": [0, 1, 2]}

    def load(**_):
        return {"test": datasets.Dataset.from_dict(rows)}

    task = ConfigurableTask(
        config={
            "task": "tiny_choices",
            "custom_dataset": load,
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc"}],
        }
    )
    results = lm_eval.simple_evaluate(model=TreewiseLM(tiny_llm()), tasks=[task], bootstrap_iters=0)
    model = tiny_model()
    right = [
        answer == max(range(3), key=lambda i, c=context: dense_score(model, c.encode(), CHOICES[i].encode())[0])
        for context, answer in zip(CONTEXTS, rows["answer"], strict=True)
    ]
    assert results["results"]["tiny_choices"]["acc,none"] == pytest.approx(sum(right) / 3)

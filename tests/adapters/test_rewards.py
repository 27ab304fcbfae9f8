"""Reward models: the values of each text alone, whatever batch it is in, and programs that choose by them."""

import pytest
import torch
from tiny import idle, tiny_llm

from treewise.rewards import SequenceRewardModel, TokenRewardModel
from treewise.search import best_of_n, step_beam_search

transformers = pytest.importorskip("transformers")
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

TEXTS = ["2 + 3 = 5", "It is five, as anyone can see.\nSo: 5", "6", "\n3\n\n4\nand 5"]
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 258,
}
TEMPLATE = (
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


MESSAGES = [{"role": "user", "content": "2 + 3?"}]


def byte_tokenizer(**options):
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def sequence_model(num_labels=1, **options):
    torch.manual_seed(0)
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SIZES | options, num_labels=num_labels)
    ).eval()


def token_model(num_labels=2):
    torch.manual_seed(0)
    return transformers.Qwen2ForTokenClassification(transformers.Qwen2Config(**SIZES, num_labels=num_labels)).eval()


@torch.inference_mode()
def logits_alone(model, text):
    return model(input_ids=torch.tensor([byte_tokenizer()(text)["input_ids"]])).logits[0]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_values_are_those_of_each_text_alone(batch_size):
    model = sequence_model()
    rate = SequenceRewardModel(model, byte_tokenizer(), batch_size=batch_size)
    assert rate(TEXTS) == pytest.approx([float(logits_alone(model, text)) for text in TEXTS], abs=1e-5)
    assert rate([]) == []


def test_a_model_without_padding_rates_one_at_a_time():
    model = sequence_model(pad_token_id=None)
    values = SequenceRewardModel(model, byte_tokenizer())(TEXTS)
    assert values == pytest.approx([float(logits_alone(model, text)) for text in TEXTS], abs=1e-5)


def test_of_several_labels_the_probability_of_one_counts():
    model = sequence_model(3)
    expected = [float(logits_alone(model, text).softmax(-1)[2]) for text in TEXTS]
    assert SequenceRewardModel(model, byte_tokenizer(), label=2)(TEXTS) == pytest.approx(expected, abs=1e-5)
    assert SequenceRewardModel(model, byte_tokenizer(), label="LABEL_2")(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_a_question_stands_before_the_text_or_in_the_chat_template():
    model = sequence_model()
    plain = SequenceRewardModel(model, byte_tokenizer(chat_template=TEMPLATE)).about("2 + 3?")
    assert plain(["5"]) == pytest.approx([float(logits_alone(model, "2 + 3?5"))], abs=1e-5)
    chat = SequenceRewardModel(model, byte_tokenizer(chat_template=TEMPLATE)).about(MESSAGES)
    assert chat(["5"]) == pytest.approx([float(logits_alone(model, "<user>2 + 3?<assistant>5"))], abs=1e-5)


@pytest.mark.parametrize("question", ["2 + 3?", MESSAGES])
def test_steps_are_rated_at_their_ends(question):
    model = token_model()
    rate = TokenRewardModel(model, byte_tokenizer(chat_template=TEMPLATE), label=1, marker=" ;", batch_size=3)
    before = question if isinstance(question, str) else "<user>2 + 3?<assistant>"
    for text, steps in zip(TEXTS, rate.steps(TEXTS, question), strict=True):
        parts = [part for part in text.split("\n") if part]
        whole = before + "".join(f"{part} ;" for part in parts)
        ends = [len(before + "".join(f"{part} ;" for part in parts[: i + 1])) - 1 for i in range(len(parts))]
        assert steps == pytest.approx(logits_alone(model, whole).softmax(-1)[ends, 1].tolist(), abs=1e-5)


def test_a_text_is_worth_what_its_steps_are():
    model, text = token_model(), "a\nb\nc"
    [steps] = TokenRewardModel(model, byte_tokenizer(), label=0).steps([text])
    worth = {"min": min(steps), "last": steps[-1], "mean": sum(steps) / 3, "product": steps[0] * steps[1] * steps[2]}
    assert len(steps) == 3
    for aggregate, value in worth.items():
        rate = TokenRewardModel(model, byte_tokenizer(), label=0, aggregate=aggregate)
        assert rate([text]) == pytest.approx([value])
    assert len(TokenRewardModel(model, byte_tokenizer(), label=0).steps(["", "\n"])) == 2


def test_programs_choose_by_a_reward_model_in_worker_threads():
    llm, rate = tiny_llm(), SequenceRewardModel(sequence_model(), byte_tokenizer())
    settings = {"n": 4, "by": rate.about("Q"), "temperature": 1.0, "max_tokens": 8}
    for result in llm.run(best_of_n, ["one", "two", "three"], seed=1, **settings):
        answers = [branch for branch in result.value.tree.branches() if branch.parent is not None]
        values = rate([branch.text for branch in answers], "Q")
        assert result.value.score == pytest.approx(max(values), abs=1e-5)
        assert result.value is answers[values.index(max(values))]
    process = TokenRewardModel(token_model(), byte_tokenizer(), label=1)
    settings = {"depth": 2, "width": 4, "evaluate": process, "thought_tokens": 6, "answer_tokens": 4}
    [result] = llm.run(step_beam_search, ["one"], seed=1, **settings)
    chain = result.value.parent
    assert chain.score == pytest.approx(process([chain.text])[0], abs=1e-5)
    idle(llm)


def test_a_model_is_loaded_by_its_name(tmp_path):
    model = sequence_model()
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = SequenceRewardModel(str(tmp_path), device="cpu")
    assert loaded(TEXTS) == pytest.approx(SequenceRewardModel(model, byte_tokenizer())(TEXTS), abs=1e-5)


def test_errors_name_what_is_wrong():
    model, tokenizer = sequence_model(2), byte_tokenizer()
    with pytest.raises(ValueError, match="tokenizer: a model in memory needs"):
        SequenceRewardModel(model)
    for label in (None, "good", 2):
        with pytest.raises(ValueError, match="choose one of LABEL_0, LABEL_1, or 0 to 1"):
            SequenceRewardModel(model, tokenizer, label=label)
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1"):
        SequenceRewardModel(model, tokenizer, label=0, batch_size=0)
    rate = SequenceRewardModel(model, tokenizer, label=0)
    with pytest.raises(ValueError, match="129 tokens, more than the reward model's 128"):
        rate(["x" * 129])
    with pytest.raises(ValueError, match="no tokens"):
        rate([""])
    with pytest.raises(ValueError, match="question: the reward model has no chat template"):
        rate(["x"], MESSAGES)
    with pytest.raises(ValueError, match="aggregate is 'max'; choose one of min, last, mean, product"):
        TokenRewardModel(token_model(), tokenizer, label=0, aggregate="max")
    with pytest.raises(ValueError, match="separator and marker must not be empty"):
        TokenRewardModel(token_model(), tokenizer, label=0, marker="")

"""The tokenizers of real GGUF files."""

import random

import pytest
from model_files import REAL_MODELS

from treewise.models import load_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [
    "",
    "a  0",
    "  1\t",
    " ١²",
    "Hello world! I'm 12345, you're 67.",
    "你好👍\n\n\n  ď",
    "e\u0301 and é",
    "def f(x):\n    return x  # ok\r\n",
    "<|im_end|> <eos> <|endoftext|> <think>",
    "👨‍👩‍👧 \u200d NUL \0",
    "tabs\t\t and   runs    of     spaces          ",
]


@pytest.fixture(scope="module")
def tokenizers(model_path):
    return {name: load_tokenizer(model_path(name)) for name in REAL_MODELS}


def random_text(number):
    draw = random.Random(number)
    alphabet = ["ab cXYZ.,'  \n\t0123456789", "éüßđ²½", "你好日本語", "👍🏽👨‍👩‍👧", "\u0301\u200d\ufffd", "<|im_end|>"]
    return "".join(draw.choice(draw.choice(alphabet)) for _ in range(60))


@pytest.mark.parametrize("name", REAL_MODELS)
def test_bytes_of_tokens_join_to_the_text(name, tokenizers):
    tokenizer = tokenizers[name]
    for text in [*TEXTS, *map(random_text, range(50))]:
        ids = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", ["qwen2", "gemma3"])
def test_ids_equal_transformers(name, tokenizers, model_path):
    """Not so for SmolLM2, whose text splitting Transformers does not take from the file."""
    transformers = pytest.importorskip("transformers")
    path = model_path(name)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*TEXTS, *map(random_text, range(50))]:
        assert tokenizers[name].encode(text, parse_special=True) == theirs(text).input_ids, text


@pytest.mark.parametrize(
    ("text", "ids"),
    [("a  0", [81, 256, 32]), ("DEFGHIJ", None), ("👍", None), ("Answer", [21350]), ("hello world", [28120, 905])],
)
def test_measured_ids_of_smollm2(text, ids, tokenizers):
    tokenizer = tokenizers["smollm2"]
    pieces = {"DEFGHIJ": [b"DEF", b"GH", b"I", b"J"], "👍": [b"\xf0\x9f", b"\x91", b"\x8d"]}
    if ids is None:
        assert [tokenizer.token_bytes(token) for token in tokenizer.encode(text)] == pieces[text]
    else:
        assert tokenizer.encode(text) == ids


def test_what_the_models_declare(tokenizers):
    smollm2, qwen2, gemma3 = (tokenizers[name] for name in REAL_MODELS)
    assert (smollm2.bos_token_id, qwen2.bos_token_id, gemma3.bos_token_id) == (1, 151643, 2)
    assert smollm2.eos_token_ids == {0, 2}  # <|endoftext|>, <|im_end|>
    assert qwen2.eos_token_ids == {151643, 151645}
    assert gemma3.eos_token_ids == {1, 106}  # <eos>, <end_of_turn>
    assert (smollm2.encode("a")[0], gemma3.encode("a")[0]) == (81, 2)  # no bos, bos
    assert [tokenizer.has_chat_template for tokenizer in (smollm2, qwen2, gemma3)] == [True, True, False]


def test_a_chat_of_each_model_that_chats(tokenizers):
    messages = [{"role": "user", "content": "Hi"}]
    for name, system in (("smollm2", "SmolLM, trained by Hugging Face"), ("qwen2", "Qwen, created by Alibaba Cloud.")):
        tokenizer = tokenizers[name]
        ids = tokenizer.apply_chat_template(messages)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        assert text.startswith("<|im_start|>system\nYou are ") and system in text
        assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.bos_token_id not in ids or name == "smollm2"

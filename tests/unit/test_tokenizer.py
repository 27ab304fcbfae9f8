"""The tokenizer: bytes, special tokens, chat templates, odd text; GGUF vocabularies of both kinds."""

import json
import threading

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from treewise.models import Tokenizer
from treewise.models.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer
from treewise.models.tokenizer import BYTE_ALPHABET

SPELL = {byte: character for character, byte in BYTE_ALPHABET.items()}


def spell(text):
    return "".join(SPELL[byte] for byte in text.encode())


def byte_level(pre="smollm", merges=("  ", "ab", "12", "Ab"), **extra):
    """GGUF metadata of a byte-level vocabulary with a few merges of two characters."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", *SPELL.values(), *map(spell, merges)]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": [" ".join(spell(merge)) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **extra,
    }


def sentencepiece(architecture="llama", **extra):
    """GGUF metadata of a SentencePiece vocabulary with byte fallback."""
    pieces = ["▁", "h", "i", "▁h", "hi", "▁hi", "e", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -2.0, -1.0, -3.0, -13.0, -4.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **extra,
    }


def make(metadata):
    backend, settings, ends = build_tokenizer(metadata)
    return Tokenizer(backend, settings, ends)


def pieces(tokenizer, text, **options):
    return [tokenizer.token_bytes(token) for token in tokenizer.encode(text, **options)]


ROUND_TRIPS = [
    "",
    "plain",
    "a  0",
    "  1\t",
    " ١²",
    "e\u0301 is two characters",
    "👍🏽 你好 ď",
    "👨‍👩‍👧 zero-width joiners",
    "NUL \0 inside",
    "\r\n\n\t  tail  ",
    "<|im_end|> in a text",
    "<think> is no special token",
    "▁ a low line that SentencePiece uses",
]


@pytest.mark.parametrize("text", ROUND_TRIPS)
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_bytes_of_byte_level_tokens_join_to_the_text(pre, text):
    tokenizer = make(byte_level(pre))
    assert b"".join(pieces(tokenizer, text)) == text.encode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [text for text in ROUND_TRIPS if "▁" not in text])
def test_bytes_of_sentencepiece_tokens_join_to_the_text(text):
    plain = make(sentencepiece(**{"tokenizer.ggml.add_space_prefix": False}))
    assert b"".join(pieces(plain, text)) == text.encode()
    prefixed = make(sentencepiece())
    assert b"".join(pieces(prefixed, text)) == (b" " + text.encode() if text else b"")
    assert prefixed.decode(prefixed.encode(text)) == text


def test_sentencepiece_merges_follow_the_scores():
    """In " hi", "hi" scores above "▁h" and joins first; then "▁hi" is the whole word."""
    assert pieces(make(sentencepiece()), "hi") == [b"", b" hi"]
    metadata = sentencepiece()
    metadata["tokenizer.ggml.tokens"][-3] = "▁hx"  # without the whole word, its end stays together
    assert pieces(make(metadata), "hi") == [b"", b" ", b"hi"]


def test_gemma_spells_runs_of_spaces_as_spaces():
    metadata = sentencepiece("gemma3", **{"tokenizer.ggml.add_space_prefix": False})
    metadata["tokenizer.ggml.tokens"][-1] = "  "
    metadata["tokenizer.ggml.token_type"][-1] = 4
    tokenizer = make(metadata)
    assert pieces(tokenizer, "e  e")[1:] == [b"e", b"  ", b"e"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a  0", ["a", "  ", "0"]),
        ("gpt-2", "a  0", ["a", " ", " ", "0"]),
        ("smollm", "1212", ["1", "2", "1", "2"]),
        ("gpt-2", "1212", ["12", "12"]),
        ("qwen2", "1212", ["1", "2", "1", "2"]),
        ("llama-bpe", "1212", ["12", "1", "2"]),
        ("default", "1212", ["12", "1", "2"]),
        ("smollm", "١²", [b"\xd9", b"\xa1", b"\xc2", b"\xb2"]),
    ],
)
def test_digits_and_spaces_are_cut_as_the_file_says(pre, text, expected):
    expected = [piece.encode() if isinstance(piece, str) else piece for piece in expected]
    assert pieces(make(byte_level(pre)), text, add_special_tokens=False) == expected


def test_special_tokens_are_parsed_only_where_asked():
    tokenizer = make(byte_level())
    text = "ab<|im_end|>"
    assert 2 not in tokenizer.encode(text)
    assert b"".join(pieces(tokenizer, text)) == text.encode()
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed[-1] == 2 and tokenizer.token_bytes(2) == b""
    assert tokenizer.decode(parsed) == "ab"
    assert tokenizer.decode(parsed, skip_special_tokens=False) == text


def test_tokens_that_users_added_are_whole_and_have_bytes():
    tokenizer = make(byte_level())
    assert pieces(tokenizer, "a<think>b") == [b"a", b"<think>", b"b"]
    assert tokenizer.decode(tokenizer.encode("a<think>b")) == "a<think>b"


def test_parsing_in_one_thread_does_not_change_another():
    tokenizer = make(byte_level())
    wrong = []

    def work(parse):
        for _ in range(300):
            if (2 in tokenizer.encode("x<|im_end|>", parse_special=parse)) != parse:
                wrong.append(parse)

    threads = [threading.Thread(target=work, args=(parse,)) for parse in (True, False) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("extra", "begins", "ends"),
    [
        ({}, False, False),
        ({"tokenizer.ggml.add_bos_token": True}, True, False),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}, True, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True, False),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False, False),
    ],
)
def test_bos_and_eos_as_the_file_says(extra, begins, ends):
    tokenizer = make(byte_level(**extra))
    expected = [1] * begins + tokenizer.encode("ab", add_special_tokens=False) + [2] * ends
    assert tokenizer.encode("ab") == expected
    assert tokenizer.encode("") == [1] * begins + [2] * ends
    assert tokenizer.bos_token_id == 1 and tokenizer.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("text", "read_as"),
    [("\ud83d", "\ufffd"), ("a\udc4db", "a\ufffdb"), ("\ud83d\udc4d", "👍"), ("\ud83d\ud83d\udc4d", "\ufffd👍")],
)
def test_lone_surrogates_are_read_as_replacement_characters(text, read_as):
    tokenizer = make(byte_level())
    assert tokenizer.encode(text) == tokenizer.encode(read_as)


def test_ten_thousand_combining_marks():
    text = "e" + "\u0301" * 10_000
    tokenizer = make(byte_level("qwen2"))
    assert b"".join(pieces(tokenizer, text)) == text.encode()


def test_ids_outside_of_the_vocabulary_stand_for_nothing():
    tokenizer = make(byte_level())
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.decode([tokenizer.vocab_size + 7, *tokenizer.encode("ab")]) == "ab"


def test_unused_tokens_of_the_file_are_left_out():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("[PAD1]")
    metadata["tokenizer.ggml.token_type"].append(5)
    tokenizer = make(metadata)
    assert tokenizer.token_bytes(len(metadata["tokenizer.ggml.tokens"]) - 1) == b""


def test_a_cut_character_decodes_to_a_replacement_character():
    tokenizer = make(byte_level(merges=()))
    ids = tokenizer.encode("👍")
    assert len(ids) == 4
    assert tokenizer.decode(ids[:2]) == "\ufffd"


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role == 'nobody' %}{{ raise_exception('nobody speaks') }}{% endif %}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}\n"
    "{% endfor %}"
    "{{ {'a': '<é>'} | tojson }}"
    "{% generation %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}{% endgeneration %}"
)


def chat_tokenizer():
    return make(byte_level(**{"tokenizer.chat_template": TEMPLATE}))


def test_a_chat_template_renders_as_in_transformers():
    from transformers import PreTrainedTokenizerFast

    tokenizer = chat_tokenizer()
    backend, settings, _ = build_tokenizer(byte_level(**{"tokenizer.chat_template": TEMPLATE}))
    settings.pop("tokenizer_class")
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    messages = [{"role": "system", "content": "Be brief. <b>"}, {"role": "user", "content": "  Hi\n"}]
    for prompt in (True, False):
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert tokenizer.render_chat(messages, prompt) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert tokenizer.apply_chat_template(messages, prompt) == ids


def test_chat_errors():
    with pytest.raises(ValueError, match="no chat template"):
        make(byte_level()).apply_chat_template([{"role": "user", "content": "Hi"}])
    assert not make(byte_level()).has_chat_template
    tokenizer = chat_tokenizer()
    assert tokenizer.has_chat_template
    with pytest.raises(ValueError, match="refuses these messages: nobody speaks"):
        tokenizer.apply_chat_template([{"role": "nobody", "content": "Hi"}])
    with pytest.raises(ValueError, match=r"messages\[1\] is 'Hi'"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}, "Hi"])
    with pytest.raises(ValueError, match="refuses these messages"):
        tokenizer.apply_chat_template([{"role": "user", "content": None}])


def test_a_template_cannot_reach_python():
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(ValueError, match="refuses these messages"):
        make(byte_level(**{"tokenizer.chat_template": escape})).apply_chat_template([{"role": "user", "content": ""}])


def save(folder, metadata=None, **files):
    backend, settings, _ = build_tokenizer(metadata or byte_level())
    backend.save(str(folder / "tokenizer.json"))
    settings.pop("add_bos_token"), settings.pop("add_eos_token")
    for name, contents in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(contents))


def test_ends_of_text_are_gathered_from_the_files_that_declare_them(tmp_path):
    save(tmp_path, config={"eos_token_id": 7}, generation_config={"eos_token_id": [0, 5]})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {0, 2, 5, 7}


def test_a_folder_says_how_texts_begin(tmp_path):
    save(tmp_path, byte_level(**{"tokenizer.ggml.add_bos_token": True}))
    assert Tokenizer.from_folder(tmp_path).encode("a")[0] == 1
    assert Tokenizer.from_folder(tmp_path).encode("a", add_special_tokens=False)[0] != 1
    settings = {"add_bos_token": False, "bos_token": {"content": "<|im_start|>"}}
    save(tmp_path, byte_level(**{"tokenizer.ggml.add_bos_token": True}), tokenizer_config=settings)
    assert Tokenizer.from_folder(tmp_path).encode("a")[0] != 1
    assert Tokenizer.from_folder(tmp_path).bos_token_id == 1


def test_a_template_file_counts_before_the_settings(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    save(tmp_path, tokenizer_config={"chat_template": named})
    assert Tokenizer.from_folder(tmp_path).render_chat([]) == "named"
    (tmp_path / "chat_template.jinja").write_text("filed")
    assert Tokenizer.from_folder(tmp_path).render_chat([]) == "filed"


def test_folders_without_a_usable_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"generation_config\.json holds list, not a JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_an_older_folder_without_tokenizer_json(tmp_path):
    backend, _, _ = build_tokenizer(byte_level("gpt-2"))
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert pieces(tokenizer, "ab 1212") == [b"ab", b" ", b"12", b"12"]


def test_a_tokenizer_whose_bytes_cannot_be_told_is_refused():
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="neither byte-level nor SentencePiece-like"):
        Tokenizer(backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="neither byte-level nor SentencePiece-like"):
        Tokenizer(backend)


def test_a_file_without_a_vocabulary():
    metadata = byte_level()
    del metadata["tokenizer.ggml.tokens"]
    with pytest.raises(ValueError, match="has no vocabulary"):
        build_tokenizer(metadata)

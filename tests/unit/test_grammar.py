"""Texts under grammars: what comes out satisfies them, and everything else goes on as without them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_controller_beam import tiny_llama
from tiny import EOS, VOCABULARY, Bytes, idle, tiny_llm, tiny_model

from treewise import (
    LLM,
    BeamSearchParams,
    Grammar,
    Greedy,
    RequestsFailed,
    Rows,
    SamplingParams,
    decode,
    generate,
    stream,
)
from treewise.constraint import GrammarError, Lexicon, grammar_bias
from treewise.models import read_config
from treewise.models.weights import load_weights
from treewise.sampler import SamplingRow, row_key, sample

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "re", "grey"]


@pytest.fixture(scope="module")
def llm():
    return tiny_llm()


@pytest.fixture
def lexicon():
    return Lexicon(Bytes(), VOCABULARY, {EOS})


def is_person(text):
    person = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert isinstance(person["name"], str) and len(person["name"]) <= 6
    assert isinstance(person["age"], int) and 0 <= person["age"] <= 150
    assert 1 <= len(person["tags"]) <= 3 and set(person["tags"]) <= {"a", "bc"}
    return True


def is_balanced(text):
    return text == "[" * (len(text) // 2) + "x" + "]" * (len(text) // 2)


GRAMMARS = {
    "json": (Grammar.json_schema(PERSON), is_person),
    "regex": (Grammar.regex(r"[a-c]{2,5}-\d{1,4}x?"), re.compile(r"[a-c]{2,5}-\d{1,4}x?").fullmatch),
    "choice": (Grammar.choice(COLOURS), COLOURS.__contains__),
    "escapes": (Grammar.choice(['a"\n', "\\d", "(.*"]), ['a"\n', "\\d", "(.*"].__contains__),
    "lark": (Grammar.lark('start: "x" | "[" start "]"'), is_balanced),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("temperature", [0, 0.7, 2])
def test_texts_satisfy_their_grammar(llm, name, temperature):
    grammar, satisfies = GRAMMARS[name]
    params = SamplingParams(n=1 if temperature == 0 else 30, temperature=temperature, seed=1, grammar=grammar)
    limit = 40 if name == "lark" else 400  # brackets may open for ever
    texts = set()
    for result in llm.generate(["Once", "Twice"], replace(params, max_tokens=limit)):
        for output in result.outputs:
            if output.finish_reason == "length":
                assert name == "lark"
                continue
            assert output.finish_reason == "stop"
            assert satisfies(output.text), output.text
            texts.add(output.text)
    assert len(texts) > 1 or temperature < 2 or name == "escapes"
    idle(llm)


def test_streams_chats_and_programs(llm):
    params = SamplingParams(temperature=2, seed=3, grammar=GRAMMARS["regex"][0])
    [result] = llm.generate(["Once"], params)
    assert "".join(llm.stream("Once", params)) == result.outputs[0].text
    [answer] = llm.chat([{"role": "user", "content": "Once"}], params)
    assert GRAMMARS["regex"][1](answer.outputs[0].text)

    async def twice(root):
        [first] = await generate(root.fork(), SamplingParams(grammar=Grammar.regex("[ab]{3}")))
        leaves = first.fork(3)
        await generate(leaves, SamplingParams(grammar=Grammar.regex("[cd]{4}")))
        return leaves

    [result] = llm.run(twice, ["Once"], seed=0)
    for leaf in result.value:
        assert re.fullmatch("[ab]{3}[cd]{4}", leaf.text)
    idle(llm)


# ---------------------------------------------------------------------- ends


def test_a_complete_text_ends_without_an_end_token(llm):
    params = SamplingParams(temperature=2, n=4, seed=1, grammar=Grammar.regex("a{3}b"))
    for output in llm.generate(["Once"], params)[0].outputs:
        assert (output.text, output.finish_reason, output.token_ids) == ("aaab", "stop", list(b"aaab"))


def test_a_text_that_may_go_on_ends_by_an_end_token_or_at_the_limit(llm):
    params = SamplingParams(temperature=2, n=30, seed=1, grammar=Grammar.regex("[ab]+"), max_tokens=5)
    outputs = llm.generate(["Once"], params)[0].outputs
    assert all(re.fullmatch("[ab]+", output.text) for output in outputs)
    for output in outputs:
        assert (output.token_ids[-1] == EOS) == (output.finish_reason == "stop")
        assert output.finish_reason == "stop" or len(output.token_ids) == 5
    biased = SamplingParams(grammar=Grammar.regex("[ab]+"), logit_bias={EOS: 100, ord("z"): 100})
    assert len(llm.generate(["Once"], biased)[0].outputs[0].token_ids) == 2


def test_min_tokens_and_ignore_eos_count_while_the_text_may_go_on(llm):
    ends = {"logit_bias": {EOS: 100}, "max_tokens": 20}
    wordy = SamplingParams(min_tokens=7, grammar=Grammar.regex("a*"), **ends)
    assert llm.generate(["Once"], wordy)[0].outputs[0].token_ids == [*b"a" * 7, EOS]
    endless = SamplingParams(ignore_eos=True, grammar=Grammar.regex("a*"), **ends)
    assert llm.generate(["Once"], endless)[0].outputs[0].token_ids == [*b"a" * 20]
    short = SamplingParams(min_tokens=7, ignore_eos=True, grammar=Grammar.regex("a{2}"), **ends)
    assert llm.generate(["Once"], short)[0].outputs[0].text == "aa"
    # Nothing but the end may come here, though the grammar would go on with what no token has.
    for options in ({"min_tokens": 7}, {"ignore_eos": True}):
        params = SamplingParams(grammar=Grammar.regex("aé?"), **options)
        [output] = llm.generate(["Once"], params)[0].outputs
        assert (output.text, output.finish_reason) == ("a", "stop")


def test_stop_strings_and_stop_tokens_end_a_text_early(llm):
    grammar = Grammar.regex("(ab){9}")
    [output] = llm.generate(["Once"], SamplingParams(grammar=grammar, stop="bab"))[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "bab")
    [output] = llm.generate(["Once"], SamplingParams(grammar=grammar, stop_token_ids=[ord("b")]))[0].outputs
    assert (output.token_ids, output.stop_reason) == ([*b"ab"], ord("b"))


def test_a_dead_end_fails_its_request_alone(llm):
    good, bad = (SamplingParams(grammar=Grammar.regex(text)) for text in ("ab", "aé"))
    with pytest.raises(RequestsFailed, match="no token of the model can continue") as failed:
        llm.generate(["Once"] * 3, [good, bad, good])
    assert list(failed.value.errors) == [1]
    assert isinstance(failed.value.errors[1], GrammarError)
    assert [output.outputs[0].text for output in failed.value.outputs if output is not None] == ["ab", "ab"]
    with pytest.raises(GrammarError, match="no token"):
        llm.beam_search(["Once"], BeamSearchParams(2, grammar=Grammar.regex("aé")))
    [result] = llm.beam_search(["Once"], BeamSearchParams(4, grammar=Grammar.regex("a(é|b)|[cd]é|e")))
    assert {output.text for output in result.outputs} == {"ab", "e"}  # the other beams had no way to go on
    idle(llm)


def test_a_model_without_an_end_token_and_with_spare_logits():
    class Endless(Bytes):
        eos_token_ids = frozenset()
        vocab_size = 120

        def token_bytes(self, token):
            assert token < self.vocab_size
            return bytes([token])

    endless = LLM(tiny_model(), tokenizer=Endless(), num_kv_slots=4096, device="cpu")
    params = SamplingParams(temperature=2, n=8, seed=0, grammar=Grammar.regex("[w-z]+"), max_tokens=6)
    texts = [output.text for output in endless.generate(["Once"], params)[0].outputs]
    assert all(re.fullmatch("[wx]{6}", text) for text in texts)


# ---------------------------------------------------------------------- beams and other controllers


@pytest.mark.parametrize("name", ["json", "regex", "choice"])
def test_beams_satisfy_their_grammar(llm, name):
    grammar, satisfies = GRAMMARS[name]
    [result] = llm.beam_search(["Once"], BeamSearchParams(4, grammar=grammar, max_tokens=200, length_penalty=0.0))
    assert len({output.text for output in result.outputs}) == 4
    assert all(satisfies(output.text) for output in result.outputs)
    idle(llm)


def test_wide_beams_rank_choices_by_what_the_model_says(llm):
    choices = ["red", "green", "blue", "gray", "rust"]
    params = BeamSearchParams(6, grammar=Grammar.choice(choices), length_penalty=0.0, early_stopping="never")
    [result] = llm.beam_search(["Once"], params)
    expected = {}
    for choice in choices:
        tokens = list(("Once" + choice).encode())
        [scored] = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=0))
        expected[choice] = sum(
            scored.prompt_logprobs[place][tokens[place]].logprob for place in range(len("Once"), len(tokens))
        )
    assert [output.text for output in result.outputs] == sorted(choices, key=lambda choice: -expected[choice])
    for output in result.outputs:
        assert output.cumulative_logprob == pytest.approx(expected[output.text], abs=1e-4)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_beams_equal_those_of_transformers_under_the_same_rule(tmp_path, length_penalty):
    pytest.importorskip("transformers")
    network = tiny_llama(VOCABULARY, seed=2)
    network.save_pretrained(tmp_path)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    llm = tiny_llm(load_weights(config, tmp_path, torch.float32, torch.device("cpu")))
    prompt = [*b"Once"]
    turns = [EOS, *b"abcdefgh"], [*b"ijklmnop"]
    theirs = network.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        prefix_allowed_tokens_fn=lambda _, tokens: turns[len(tokens) % 2],
        num_beams=4,
        num_return_sequences=4,
        max_new_tokens=9,
        length_penalty=length_penalty,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=EOS,
        output_scores=True,
        return_dict_in_generate=True,
    )
    params = BeamSearchParams(4, max_tokens=9, length_penalty=length_penalty, grammar=Grammar.regex("([a-h][i-p])*"))
    [ours] = llm.beam_search([prompt], params)
    texts = [llm.tokenizer.decode(tokens[len(prompt) :]) for tokens in theirs.sequences.tolist()]
    assert [output.text for output in ours.outputs] == texts
    scores = [output.cumulative_logprob / len(output.token_ids) ** length_penalty for output in ours.outputs]
    assert scores == pytest.approx(theirs.sequences_scores.tolist(), rel=1e-4)


def test_diverse_beams_satisfy_their_grammar(llm):
    params = BeamSearchParams(6, num_beam_groups=3, diversity_penalty=2.0, grammar=GRAMMARS["regex"][0])
    [result] = llm.beam_search(["Once"], params)
    assert all(GRAMMARS["regex"][1](output.text) for output in result.outputs)


class Splitting:
    """Each leaf branches in two at every third token."""

    def __init__(self, grammar, token=None):
        self.stopping = SamplingParams(grammar=grammar, max_tokens=60)
        self.token = token

    def step(self, tree, logprobs):
        assert torch.equal(tree.logits.isinf(), logprobs.isinf())
        if self.token is not None:
            return Rows([0], [self.token])
        pairs = []
        for i, row in enumerate(logprobs):
            width = min(2 if tree.depth % 3 == 0 else 1, int(row.isfinite().sum()))
            pairs += [(i, token) for token in row.topk(width).indices.tolist()]
        return Rows(*zip(*pairs, strict=True))


def test_forks_keep_states_of_their_own(llm):
    async def program(root):
        return await decode(root.fork(), Splitting(Grammar.regex("(a[bc]|d[ef]{3}){4}")))

    [result] = llm.run(program, ["Once"])
    texts = [leaf.text for leaf in result.value]
    assert len(texts) == len(set(texts)) > 8
    assert all(re.fullmatch("(a[bc]|d[ef]{3}){4}", text) for text in texts)
    idle(llm)


# ---------------------------------------------------------------------- texts in pieces


PIECE = 5
NAMES = ["a" * 13, "ab" * 6, "abba" * 4]
LONG = {
    "json": GRAMMARS["json"],
    "regex": (Grammar.regex(r"([ab]c){3,9}-\d{4}x?"), re.compile(r"([ab]c){3,9}-\d{4}x?").fullmatch),
    "choice": (Grammar.choice(NAMES), NAMES.__contains__),
    "lark": (
        Grammar.lark('start: "[" item ("," item)~2..5 "]"\nitem: /[ab]/ | "(" item ")"'),
        re.compile(r"\[\(*[ab]\)*(,\(*[ab]\)*){2,5}\]").fullmatch,
    ),
}


async def in_pieces(branches, params, width):
    """Decode texts in pieces, each branch as `width` forks while there are few; give those that have ended."""
    ended = []
    while branches and branches[0].num_tokens < 400:
        await generate(branches, replace(params, max_tokens=PIECE))
        ended += [branch for branch in branches if branch.finish_reason == "stop"]
        width = 1 if len(branches) > 16 else width
        branches = [fork for branch in branches if branch.finish_reason == "length" for fork in branch.fork(width)]
    return ended


@pytest.mark.parametrize("name", LONG)
def test_forks_go_on_with_a_text_that_was_cut_off(llm, name):
    grammar, satisfies = LONG[name]

    async def program(root):
        return await in_pieces(root.fork(2), SamplingParams(temperature=2, grammar=grammar), 2)

    [result] = llm.run(program, ["Once"], seed=4)
    texts = {leaf.text for leaf in result.value}
    assert len(texts) > (name != "choice") and all(map(satisfies, texts)), texts
    assert any(len(leaf.token_ids) > PIECE for leaf in result.value)
    idle(llm)


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_text_in_pieces_is_the_text_in_one_go(llm, name, temperature):
    params = SamplingParams(temperature=temperature, grammar=LONG[name][0])

    async def whole(root):
        return await generate(root.fork(3), replace(params, max_tokens=8 * PIECE))

    async def pieces(root):
        branches = going = root.fork(3)
        for _ in range(8):
            await generate(going, replace(params, max_tokens=PIECE))
            going = [branch for branch in going if branch.finish_reason == "length"]
        return branches

    [[one], [other]] = (llm.run(program, ["Once"], seed=2) for program in (whole, pieces))
    assert [leaf.token_ids for leaf in one.value] == [leaf.token_ids for leaf in other.value]
    assert [leaf.finish_reason for leaf in one.value] == [leaf.finish_reason for leaf in other.value]


def test_greedy_forks_go_on_as_the_text_in_one_go(llm):
    params = SamplingParams(temperature=0, grammar=GRAMMARS["json"][0])

    async def program(root):
        whole, first = root.fork(2)
        await generate([whole], replace(params, max_tokens=400))
        pieces = await in_pieces([first], params, 2)
        return [whole, *pieces]

    [result] = llm.run(program, ["Once"])
    whole, *pieces = result.value
    assert len(pieces) > 4 and all(piece.token_ids == whole.token_ids for piece in pieces) and is_person(whole.text)


def test_a_fork_may_go_on_from_within_a_text(llm):
    params = SamplingParams(temperature=2, max_tokens=90, grammar=GRAMMARS["json"][0])

    async def program(root):
        [whole] = await generate(root.fork(), params)
        assert whole.finish_reason == "stop"
        begun = whole.num_tokens - len(whole.token_ids)
        again = [whole.fork(at=begun + k)[0] for k in range(0, len(whole.token_ids), 3)]
        return await generate(again, params)

    [result] = llm.run(program, ["Once"], seed=1)
    assert all(is_person(leaf.text) for leaf in result.value) and len({leaf.text for leaf in result.value}) > 2


def test_leaves_of_a_controller_and_streams_that_are_left_go_on(llm):
    grammar = Grammar.regex("(a[bc]|d[ef]{3}){4}")

    async def controlled(root):
        short = Splitting(grammar)
        short.stopping = replace(short.stopping, max_tokens=4)
        leaves = await decode(root.fork(), short)
        return await generate(leaves, SamplingParams(temperature=1, grammar=grammar))

    async def streamed(root):
        async for _ in stream(root, SamplingParams(grammar=grammar)):
            break
        return await generate(root.fork(2), SamplingParams(temperature=1, grammar=grammar))

    for program in (controlled, streamed):
        [result] = llm.run(program, ["Once"], seed=0)
        assert len(result.value) >= 2
        assert all(re.fullmatch("(a[bc]|d[ef]{3}){4}", leaf.text) for leaf in result.value)
    idle(llm)


@pytest.mark.parametrize("between", ["end", "stop", "append", "grammar", "none"])
def test_a_text_begins_anew_after_something_else(llm, between):
    grammar = Grammar.regex("[ab]{4}")
    params = SamplingParams(max_tokens=4 if between == "end" else 3, grammar=grammar)
    if between == "stop":
        params = replace(params, stop_token_ids=[ord("a"), ord("b")])

    async def program(root):
        [branch] = await generate(root.fork(), params)
        if between == "append":
            branch.append("|")
        elif between == "grammar":
            await generate([branch], SamplingParams(grammar=Grammar.regex("[|]")))
        elif between == "none":
            await generate([branch], SamplingParams(max_tokens=1, ignore_eos=True))
        leaves = [*branch.fork(2), branch]
        return await generate(leaves, SamplingParams(grammar=grammar))

    [result] = llm.run(program, ["Once"])
    for leaf in result.value:
        assert re.fullmatch("[ab]{4}", leaf.decode(leaf.token_ids[-4:])), leaf.text
        assert len(leaf.token_ids) == {"end": 8, "stop": 5}.get(between, 8)


def test_a_controller_may_not_leave_the_grammar(llm):
    async def program(root):
        with pytest.raises(GrammarError, match="does not let token 122"):
            await decode(root.fork(), Splitting(Grammar.regex("[ab]+"), ord("z")))
        return await decode(root.fork(), Greedy(SamplingParams(grammar=Grammar.regex("[ab]{4}"))))

    [result] = llm.run(program, ["Once"])
    assert re.fullmatch("[ab]{4}", result.best.text)


def test_constraints_fork_and_look_ahead(lexicon):
    first = lexicon.start(Grammar.regex("ab|acd?"))
    first.accept(ord("a"))
    second = first.fork()
    second.accept(ord("c"))
    assert first.completes(ord("b")) and not first.completes(ord("c")) and not first.completes(ord("z"))
    first.accept(ord("b"))
    assert first.complete and not second.complete
    assert second.completes(ord("d")) and second.completes(EOS)
    with pytest.raises(GrammarError, match="token 122"):
        second.accept(ord("z"))
    second.accept(ord("d"))
    assert second.complete
    assert not lexicon.start(Grammar.regex("ab|acd?")).complete  # what was compiled once is as it was


# ---------------------------------------------------------------------- batches


def outputs(results):
    return [[(output.token_ids, output.cumulative_logprob) for output in result.outputs] for result in results]


def test_neighbours_in_a_batch_are_as_alone(llm):
    params = [
        SamplingParams(temperature=1.5, n=2, seed=5, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=2, n=3, seed=6, grammar=GRAMMARS["json"][0], max_tokens=90),
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1, seed=7, grammar=GRAMMARS["regex"][0], repetition_penalty=1.3, min_tokens=6),
        SamplingParams(temperature=1, seed=8, max_tokens=12, presence_penalty=1.0, top_k=9),
    ]
    prompts = ["Once", "Twice", "Never", "Always", "Once more"]
    together = outputs(llm.generate(prompts, params))
    alone = [outputs(llm.generate([prompt], own))[0] for prompt, own in zip(prompts, params, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
        assert [sum for _, sum in one] == pytest.approx([sum for _, sum in other], abs=1e-4)


def test_a_small_pool_changes_nothing(llm):
    params = SamplingParams(temperature=2, n=8, seed=5, grammar=GRAMMARS["json"][0], max_tokens=90)
    small = tiny_llm(num_kv_slots=256)
    assert outputs(small.generate(["Once"], params))[0] == [
        (tokens, pytest.approx(total, abs=1e-3)) for tokens, total in outputs(llm.generate(["Once"], params))[0]
    ]
    idle(small)


def test_log_probs_are_those_of_the_model(llm):
    params = SamplingParams(temperature=2, seed=2, grammar=GRAMMARS["regex"][0], logprobs=2)
    [output] = llm.generate(["Once"], params)[0].outputs
    tokens = [*b"Once", *output.token_ids]
    [scored] = llm.generate([tokens], SamplingParams(max_tokens=0, prompt_logprobs=2))
    for place, token in enumerate(output.token_ids):
        there = scored.prompt_logprobs[place + 4]
        assert output.logprobs[place][token].logprob == pytest.approx(there[token].logprob, abs=1e-4)
        assert set(output.logprobs[place]) == set(there)


def test_rows_under_a_grammar_follow_the_softmax_over_what_it_allows(lexicon):
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=1.0)
    rows = [
        SamplingRow(params, row_key(0, (i,)), 0, constraint=lexicon.start(Grammar.regex("[a-d]x"))) for i in range(4000)
    ]
    counts = torch.bincount(sample(logits.expand(len(rows), -1), rows, {EOS}), minlength=VOCABULARY)
    expected = logits[0, 97:101].softmax(-1) * len(rows)
    assert counts[97:101].sum() == len(rows)
    assert (((counts[97:101] - expected) ** 2 / expected).sum() < 25).item()


def test_masks_say_which_tokens_may_come(lexicon):
    constraints = [lexicon.start(Grammar.regex(text)) for text in ("[ab]+", "x")]
    constraints[0].accept(ord("a"))
    bias = grammar_bias(constraints, [(), ()], torch.device("cpu"))
    assert bias.shape == (2, VOCABULARY)
    assert [row.isfinite().nonzero().flatten().tolist() for row in bias] == [[EOS, 97, 98], [120]]
    bias = grammar_bias(constraints, [{EOS}, {120}], torch.device("cpu"))
    assert [row.isfinite().nonzero().flatten().tolist() for row in bias] == [[97, 98], [120]]


@pytest.mark.parametrize("blank", [b"", b" "])
def test_a_text_without_a_choice_is_written_as_the_tokenizer_would(blank):
    class Words(Bytes):
        vocab_size = VOCABULARY + 2

        def encode(self, text, *, add_special_tokens=True):
            data = blank + text.encode()
            return [VOCABULARY + 1] if data == b" hello" else [VOCABULARY] if data == b"hello" else list(data)

        def token_bytes(self, token):
            return super().token_bytes(token) if token < VOCABULARY else [b"hello", b" hello"][token - VOCABULARY]

    lexicon = Lexicon(Words(), VOCABULARY + 2, {EOS})
    bias = grammar_bias([lexicon.start(Grammar.choice(["hello"]))], [()], torch.device("cpu"))
    assert bias[0].isfinite().nonzero().flatten().tolist() == [VOCABULARY]


def test_the_example_counts_votes_field_by_field(monkeypatch, capsys):
    path = Path(__file__).parents[2] / "examples" / "json_extraction.py"
    spec = importlib.util.spec_from_file_location("json_extraction", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "LLM", lambda *_, **__: tiny_llm())
    monkeypatch.setattr(example, "FACTS", dict(list(example.FACTS.items())[:1]))
    example.main(n=3, beam_width=2)
    printed = capsys.readouterr().out
    assert re.search(r"^age: .* by \d of 3, (right|wrong)", printed, re.MULTILINE)
    assert re.search(r"^likeliest: \{ ?\"name\"", printed, re.MULTILINE)
    assert re.search(r"^\d of 3 fields are right", printed, re.MULTILINE)


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.regex("a("), "grammar: this regex cannot be used: .*unclosed group"),
        (lambda: Grammar.regex(3), "grammar: regex must be text"),
        (lambda: Grammar.json_schema("{"), "grammar: this json_schema is not JSON"),
        (lambda: Grammar.json_schema([1]), "grammar: json_schema must be a JSON object"),
        (lambda: Grammar.json_schema({"type": {1}}), "grammar: this json_schema cannot be written as JSON"),
        (lambda: Grammar.json_schema({"type": "nothing"}), "grammar: this json_schema cannot be used: Invalid type"),
        (lambda: Grammar.json_schema({"type": "integer", "minimum": 3, "maximum": 1}), "Unsatisfiable schema"),
        (lambda: Grammar.choice([]), "grammar: choice must be a list of texts"),
        (lambda: Grammar.choice("ab"), "grammar: choice must be a list of texts"),
        (lambda: Grammar.choice(["a", ""]), "grammar: choice must be a list of texts"),
        (lambda: Grammar.lark("start: x"), "grammar: this lark cannot be used: .*unknown name"),
        (lambda: Grammar("grep", "a"), "grammar: kind must be one of json_schema, regex, choice, lark"),
        (lambda: SamplingParams(grammar="a+"), "grammar must be a Grammar or None, not 'a\\+'"),
        (lambda: BeamSearchParams(2, grammar={"type": "object"}), "grammar must be a Grammar or None"),
    ],
)
def test_bad_grammars_are_refused_before_anything_runs(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_grammars_are_values():
    assert Grammar.choice(["a", "b"]) == Grammar.choice(("a", "b"))
    assert Grammar.json_schema(PERSON) == Grammar.json_schema(json.dumps(PERSON))
    assert len({Grammar.regex("a"), Grammar.regex("a"), Grammar.lark('start: "a"')}) == 2


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"grammar: needs llguidance; pip install 'treewise\[grammar\]'"):
        Grammar.regex("a")

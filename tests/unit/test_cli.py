"""The command line: quick help, clean standard output, one line for a user's mistake."""

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from importlib.metadata import version
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

import treewise.llm
from treewise.cli import app, main
from treewise.cli.options import ModelOptions
from treewise.cli.search import parse_settings
from treewise.config import BeamSearchParams, SparsityOptions, Speculation
from treewise.grammar import Grammar
from treewise.results import CompletionOutput, ProgramOutput, RequestOutput, Tree, TreeNode, Usage
from treewise.search import Strategy, Trajectory
from treewise.sparsity.policy import KVSparsity

SUMS = 'start: /[0-9]/ ("+" /[0-9]/)~1..4'


class FakeLLM:
    """Answers like an engine, and remembers what it was asked."""

    asked = None

    def __init__(self, **options):
        FakeLLM.options = options
        self.tokenizer = SimpleNamespace(has_chat_template=True, apply_chat_template=self.template)

    @staticmethod
    def template(messages):
        return [len(message["content"]) for message in messages]

    def stream(self, prompt, params):
        FakeLLM.asked = (prompt, params)
        yield from ["It is", " Paris."]

    def output(self, index=0):
        return CompletionOutput(index, " Paris.", [3], float("-inf"), finish_reason="stop")

    def tree(self):
        nodes = [TreeNode(0, None, "Where?", [1], [None], state="prompt"), TreeNode(1, 0, " Paris.", [3], [-1.0], -1.0)]
        return Tree(nodes, Usage(1, 1, 1, 2, 10, 20, 0.1), best=1)

    def generate(self, prompts, params):
        FakeLLM.asked = (prompts, params)
        return [RequestOutput(0, "Where?", [1], None, [self.output(i) for i in range(params.n)], self.tree())]

    def beam_search(self, prompts, params):
        FakeLLM.asked = (prompts, params)
        return [RequestOutput(0, "Where?", [1], None, [replace(self.output(), score=-0.25)], self.tree())]

    def run(self, program, prompts, **arguments):
        FakeLLM.asked = (prompts, arguments)
        return [ProgramOutput(None, self.output(), [self.output()], self.tree())]


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    monkeypatch.setattr(treewise.llm, "LLM", FakeLLM)


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    printed = capsys.readouterr()
    assert exit.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("treewise: ") and printed.err.count("\n") == 1
    return printed.err


def test_help_loads_neither_torch_nor_a_model():
    code = "import sys; from treewise.cli import main; main(['--help']); assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    for verb in ("generate", "search", "bench", "models", "env"):
        assert verb in result.stdout


def test_every_field_of_the_engine_has_a_flag(monkeypatch):
    monkeypatch.undo()
    parameters = inspect.signature(treewise.llm.LLM.__init__).parameters
    flags = {item.name: item.default for options in (ModelOptions, SparsityOptions) for item in fields(options)}
    flags["seed"] = flags.pop("engine_seed")
    assert flags.pop("tree_size") == Speculation().tree_size  # a part of `speculate`
    own = {f"kv_{item.name}" for item in fields(KVSparsity) if item.name not in ("scorer", "budget")}
    assert {flags.pop(name) for name in own} == {None}  # parts of `kv_sparsity`
    # A tokenizer comes with a model that is in memory, which no flag can name.
    named = [name for name in parameters if name not in ("self", "tokenizer")]
    assert flags == {name: parameters[name].default for name in named}


def test_generate_streams(capsys):
    main(["generate", "Where?", "--temperature", "0", "--stop", "a", "--stop", "b", "--page-size", "1"])
    assert capsys.readouterr().out == "It is Paris.\n"
    prompt, params = FakeLLM.asked
    assert (prompt, params.temperature, params.stop) == ("Where?", 0, ("a", "b"))
    assert FakeLLM.options["page_size"] == 1 and FakeLLM.options["seed"] == 0


def test_generate_speculates():
    main(["generate", "Where?", "--speculate", "draft:small", "--tree-size", "12"])
    assert FakeLLM.options["speculate"] == Speculation("draft:small", 12) and "tree_size" not in FakeLLM.options


@pytest.mark.parametrize("verb", ["generate", "search"])
def test_keys_are_given_up_as_told(verb):
    for flags, expected in (
        ("--kv-sparsity pyramidkv --kv-budget 512", KVSparsity.named("pyramidkv", budget=512)),
        ("--kv-sparsity snapkv --kv-budget 0.25 --kv-sinks 0", KVSparsity.named("snapkv", budget=0.25, sinks=0)),
        ("--kv-sparsity h2o --kv-budget 1.0", KVSparsity.named("h2o", budget=1.0)),
        (
            "--kv-sparsity novita --kv-window 8 --kv-first-full 2 --kv-every 128",
            KVSparsity.named("novita", window=8, first_full=2, every=128),
        ),
    ):
        main([verb, "Where?", *flags.split()])
        assert FakeLLM.options["kv_sparsity"] == expected
        assert not {name for name in FakeLLM.options if name.startswith("kv_")} - {"kv_sparsity", "kv_cache_dtype"}
    main([verb, "Where?"])
    assert FakeLLM.options.get("kv_sparsity") is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--kv-sparsity snapcv", "policy is 'snapcv'; choose one of adakv, "),
        ("--kv-budget 512", "kv_budget: it is a setting of KV sparsity; give kv_sparsity too"),
        ("--kv-window 8", "kv_window: it is a setting"),
        ("--kv-sparsity snapkv --kv-budget half", "kv_budget: 'half' is neither a number nor a share, as 0.25"),
        ("--kv-sparsity snapkv --kv-budget 36", "budget must be an integer of at least 37, more than window (32)"),
        ("--kv-sparsity snapkv --kv-budget 1.5", "budget must be"),
        ("--kv-sparsity snapkv --kv-every 0", "every must be"),
    ],
)
def test_policies_that_cannot_be(capsys, flags, message):
    assert message in fails(capsys, "generate", "x", *flags.split())


def test_generate_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", StringIO("Where\nis it?"))
    main(["generate"])
    assert FakeLLM.asked[0] == "Where\nis it?"


def test_generate_chats(capsys):
    main(["generate", "Where?", "--chat", "--system", "Be brief."])
    assert FakeLLM.asked[0] == [9, 6]


def test_generate_takes_a_grammar(capsys, tmp_path):
    pytest.importorskip("llguidance")
    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    (tmp_path / "sums.lark").write_text(SUMS)
    for flag, value, grammar in (
        ("--json-schema", '{"type": "integer"}', Grammar.json_schema({"type": "integer"})),
        ("--json-schema", str(tmp_path / "schema.json"), Grammar.json_schema({"type": "integer"})),
        ("--regex", "[0-9]+", Grammar.regex("[0-9]+")),
        ("--choice", "yes,no", Grammar.choice(["yes", "no"])),
        ("--lark", SUMS, Grammar.lark(SUMS)),
        ("--lark", str(tmp_path / "sums.lark"), Grammar.lark(SUMS)),
    ):
        main(["generate", "Where?", "--max-tokens", "9", flag, value])
        assert FakeLLM.asked[1].grammar == grammar and FakeLLM.asked[1].max_tokens == 9
        capsys.readouterr()
    assert "cannot be used beside json_schema" in fails(capsys, "generate", "a", "--regex", "b", "--json-schema", "{}")
    assert "regex" in fails(capsys, "generate", "a", "--regex", "(")
    assert "schema.txt" in fails(capsys, "generate", "a", "--json-schema", "schema.txt")
    assert "none.lark" in fails(capsys, "generate", "a", "--lark", "none.lark")
    assert "lark cannot be used" in fails(capsys, "generate", "a", "--lark", "start: nothing")


def test_generate_searches_with_beams(capsys):
    main(["generate", "Where?", "--beam-width", "4", "--max-tokens", "9", "--stop", "a"])
    assert FakeLLM.asked == (["Where?"], BeamSearchParams(4, max_tokens=9, stop=("a",)))
    assert capsys.readouterr().out == "--- 0: score -0.250, log-prob -inf, stop\n Paris.\n"
    flags = "--beam-width 6 --length-penalty 0.5 --early-stopping never --num-return-sequences 2"
    main(["generate", "Where?", "--json", *flags.split(), "--num-beam-groups", "3", "--diversity-penalty", "0.7"])
    assert FakeLLM.asked[1] == BeamSearchParams(
        6,
        length_penalty=0.5,
        early_stopping="never",
        num_return_sequences=2,
        num_beam_groups=3,
        diversity_penalty=0.7,
    )
    assert json.loads(capsys.readouterr().out)["outputs"][0]["score"] == -0.25
    for word, value in (("true", True), ("false", False)):
        main(["generate", "Where?", "--beam-width", "4", "--early-stopping", word])
        assert FakeLLM.asked[1].early_stopping is value


def test_beams_under_a_grammar(capsys):
    pytest.importorskip("llguidance")
    main(["generate", "Where?", "--beam-width", "2", "--regex", "[ab]+"])
    assert FakeLLM.asked[1] == BeamSearchParams(2, grammar=Grammar.regex("[ab]+"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--length-penalty 2", "length_penalty: it is an option of beam search; give beam_width too"),
        ("--early-stopping true", "early_stopping: it is"),
        ("--num-return-sequences 1", "num_return_sequences: it is"),
        ("--beam-width 4 --n 2", "n: beam search does not sample; give it without beam_width"),
        ("--beam-width 4 --temperature 0.5", "temperature: beam search does not sample"),
        ("--beam-width 4 --seed 1", "seed: beam search"),
        ("--beam-width 4 --num-return-sequences 5", "num_return_sequences must be an integer in [1, 4]"),
        ("--beam-width 4 --num-beam-groups 3", "num_beam_groups must divide beam_width (4), not 3"),
        ("--beam-width 4 --diversity-penalty 1", "diversity_penalty must be 0 with one beam group"),
        ("--beam-width 4 --early-stopping soon", "early-stopping"),
        ("--beam-width 0", "beam_width must be"),
    ],
)
def test_flags_that_do_not_go_together(capsys, flags, message):
    assert message in fails(capsys, "generate", "x", *flags.split())


def test_generate_writes_json(capsys):
    main(["generate", "Where?", "--n", "2", "--json"])
    [line] = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert [output["text"] for output in answer["outputs"]] == [" Paris.", " Paris."]
    assert answer["outputs"][0]["cumulative_logprob"] == "-Infinity"
    assert answer["usage"]["completion_tokens"] == 1


def test_search_answers_and_draws(capsys, tmp_path):
    files = {name: tmp_path / f"tree.{name}" for name in ("html", "json", "dot")}
    main(["search", "Where?", "--text", *(word for name, path in files.items() for word in (f"--{name}", str(path)))])
    out = capsys.readouterr().out
    assert out.startswith(" Paris.\n▸ Where?")
    assert files["html"].read_text(encoding="utf-8").startswith("<!doctype html>")
    assert Tree.from_json(files["json"].read_text()).strategy == "tot"
    assert files["dot"].read_text().startswith("digraph")


def test_search_chats_where_the_model_can():
    main(["search", "Where?"])
    assert FakeLLM.asked[0] == [[6]]
    main(["search", "Where?", "--no-chat"])
    assert FakeLLM.asked[0] == ["Where?"]
    main(["search", "Where?", "--system", "Be brief."])
    assert FakeLLM.asked[0] == [[9, 6]]


@pytest.fixture
def settings(monkeypatch):
    """Keep what the strategies are built with."""
    kept = []
    monkeypatch.setattr(Strategy, "build", lambda self, **settings: kept.append((self.name, settings)))
    return kept


@pytest.mark.parametrize(
    ("name", "width"),
    [("best-of-n", "n"), ("self-consistency", "n"), ("beam", "beam_width"), ("tot", "width"), ("mcts", "width")],
)
def test_search_takes_how_many_to_draw(settings, capsys, name, width):
    main(["search", "Where?", "--strategy", name, "--n", "5", "--set", "max_tokens=9"])
    assert settings == [(name.replace("-", "_"), {width: 5, "max_tokens": 9})]
    capsys.readouterr()
    assert f"set: {width} is given by --n" in fails(
        capsys, "search", "x", "--strategy", name, "--n", "5", "--set", f"{width}=3"
    )


def test_search_takes_a_grammar(settings, capsys):
    pytest.importorskip("llguidance")
    for strategy in ("best_of_n", "beam", "mcts"):
        main(["search", "Where?", "--strategy", strategy, "--lark", SUMS])
        assert settings.pop() == (strategy, {"grammar": Grammar.lark(SUMS)})
    capsys.readouterr()
    assert "cannot be used beside" in fails(capsys, "search", "x", "--regex", "a", "--lark", SUMS)
    assert "given by a grammar" in fails(capsys, "search", "x", "--regex", "a", "--set", "grammar=b")


def test_settings_may_be_grammars(settings, capsys, tmp_path):
    pytest.importorskip("llguidance")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}', encoding="utf-8")
    for word, grammar in (
        (r"regex:\d+:[a-z]", Grammar.regex(r"\d+:[a-z]")),
        ("choice:yes,no", Grammar.choice(["yes", "no"])),
        (f"lark:{SUMS}", Grammar.lark(SUMS)),
        ('json_schema:{"type": "integer"}', Grammar.json_schema('{"type": "integer"}')),
        (f"json-schema:{schema}", Grammar.json_schema('{"type": "integer"}')),
        ("null", None),
    ):
        main(["search", "Where?", "--set", f"thought-grammar={word}", "--regex", "a"])
        assert settings.pop() == ("tot", {"thought_grammar": grammar, "grammar": Grammar.regex("a")})
    capsys.readouterr()
    for word in ("[ab]+", "words:a", "3"):
        message = fails(capsys, "search", "x", "--set", f"thought_grammar={word}")
        assert "set: thought_grammar: " in message and "one of json_schema, regex, choice, lark" in message
    assert "set: grammar: grammar: this regex" in fails(capsys, "search", "x", "--set", "grammar=regex:(")


def test_search_refuses_what_a_strategy_lacks(capsys):
    pytest.importorskip("llguidance")
    assert "grammar: strategy replay has no such" in fails(
        capsys, "search", "x", "--strategy", "replay", "--regex", "a"
    )
    assert "n: one number does not say how rollouts branches" in fails(
        capsys, "search", "x", "--strategy", "rollouts", "--n", "4"
    )


def test_rollouts_are_lines_of_json(capsys, monkeypatch):
    trajectory = Trajectory(0, None, 0, [1], [3], [float("-inf")], " Paris.", "stop", 1.0, 0.0, [])
    monkeypatch.setattr(
        FakeLLM, "run", lambda self, program, prompts, **_: [ProgramOutput([trajectory] * 2, None, [], self.tree())]
    )
    main(["search", "Where?", "--strategy", "rollouts", "--set", "widths=[2]", "--set", "at=[]"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["token_ids"] for line in lines] == [[3], [3]]
    assert lines[0]["logprobs"] == ["-Infinity"]


@pytest.mark.parametrize(
    "verb",
    [
        "generate",
        "search",
        "models",
        "env",
        "bench attention",
        "bench tree",
        "bench fit",
        "run",
        "bench throughput",
        "bench serve",
        "bench replicas",
        "eval kv",
        "eval heads",
    ],
)
def test_help_has_a_word_on_each_flag_and_no_empty_default(verb, capsys):
    app([*verb.split(), "--help"], console=Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if line.startswith("│ --")]
    assert flags or verb in ("models", "env")
    for line in flags:
        words = line.strip("│ ").partition("  ")[2].strip()
        assert words and not words.startswith("[default"), line
    text = " ".join(lines)
    assert "--empty-" not in text and not re.search(r"\[default: (\(\)|\{\}|None)?\]", text)


def test_search_lists_strategies(capsys):
    main(["strategies"])
    out = capsys.readouterr().out
    assert "tot: " in out and "--set width=" in out


def test_mistakes_are_one_line(capsys):
    assert "temperature" in fails(capsys, "generate", "x", "--temperature", "-1")
    assert "--bogus" in fails(capsys, "generate", "x", "--bogus", "1")
    assert "--chat" in fails(capsys, "generate", "x", "--system", "y")
    assert "tot" in fails(capsys, "search", "x", "--strategy", "guess")
    assert "no such setting" in fails(capsys, "search", "x", "--set", "bogus=1")
    assert "--no-chat" in fails(capsys, "search", "x", "--system", "y", "--no-chat")
    assert "key=value" in fails(capsys, "search", "x", "--set", "width")
    assert "generate" in fails(capsys, "decode")


def test_a_model_that_is_not_there(capsys, monkeypatch):
    monkeypatch.undo()
    assert "no-such-model" in fails(capsys, "generate", "x", "--model", "no-such-model")


def test_settings():
    assert parse_settings(("width=5", "stop=a=b", "fast=true", 'x="1"')) == {
        "width": 5,
        "stop": "a=b",
        "fast": True,
        "x": "1",
    }


def test_models_and_env(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path))
    main(["models"])
    main(["env"])
    out = capsys.readouterr().out
    assert "smollm2-135m" in out and "nothing yet" in out
    assert "torch" in out and str(tmp_path) in out


def test_env_has_what_a_bug_report_needs_and_no_secret(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TREEWISE_CACHE", str(tmp_path))
    monkeypatch.setenv("TREEWISE_API_KEY", "hush")
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("HF_ENDPOINT", "https://me:hush@mirror/hub")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("UNRELATED", "hush")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.gguf").write_bytes(b"12345")
    main(["env", "--json"])
    out = capsys.readouterr().out
    facts = json.loads(out)
    assert "hush" not in out and "UNRELATED" not in out
    assert facts["environment"]["HF_TOKEN"] == facts["environment"]["TREEWISE_API_KEY"] == "(set, not shown)"
    assert facts["environment"]["HF_ENDPOINT"] == "https://…@mirror/hub"
    assert facts["environment"]["TOKENIZERS_PARALLELISM"] == "false"
    assert facts["packages"]["torch"] == version("torch") and facts["cpu"]["cores"] and facts["cpu"]["model"]
    assert facts["cpu"]["memory"] > 2**28 and len(facts["cuda"]["devices"]) == torch.cuda.device_count()
    assert facts["cache"] == {"folder": str(tmp_path), "models": {"a.gguf": 5}}
    main(["env"])
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["treewise"].strip() == facts["treewise"] and "hush" not in str(lines)


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out.strip()[0].isdigit()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise(monkeypatch):
    told = []
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace(mallopt=lambda *option: told.append(option)))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    main(["strategies"])
    assert told == [(-3, 32 << 20)]

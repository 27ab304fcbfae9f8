"""Whole comparisons with a tiny model: full loses nothing, branches share, the verb writes what it found."""

import json

import pytest
import torch
from tiny import Bytes, tiny_model

from treewise.cli import evaluate, main
from treewise.evaluate.branches import random_like, sample, share
from treewise.evaluate.cache import OfflineCache
from treewise.evaluate.study import ALWAYS, Study
from treewise.evaluate.summary import summarise
from treewise.evaluate.tasks import TASKS, make
from treewise.evaluate.trial import MODES, ORACLE, Contender, Row, solved, try_policies
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.scorers import KVzip, SnapKV


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_positions=2048)


@pytest.fixture(scope="module")
def rows(model):
    contenders = [Contender("full"), *(Contender(name, 64) for name in ("random", "snapkv", "kvzip", ORACLE))]
    encoded = make(TASKS["niah_multikey"], 0, 400, Bytes())
    return try_policies(
        model, encoded, contenders, list(MODES), new_tokens=6, repeat=Bytes().encode("Again: "), task="t", seed=2
    )


def test_every_policy_has_a_row_in_every_mode(rows):
    assert [row.mode for row in rows[::5]] == list(MODES)
    assert [row.policy for row in rows[:5]] == ["full", "random", "snapkv", "kvzip", "oracle"]
    assert all(row.task == "t" and row.seed == 2 and len(row.errors) == 2 for row in rows)
    for row in rows[::5]:
        assert (row.held, row.kl, row.top1, row.nll_increase) == (1, 0, 1, 0)
        assert max(row.errors) < 1e-5 and row.right == row.dense_right and row.kept == [[1, 1], [1, 1]]
    for row in rows[1:5]:
        assert 0.1 < row.held < 0.25 and row.kl > 0 and min(row.errors) > 1e-3


def test_the_oracle_is_nearer_than_chance_to_what_attention_made_of_everything(rows):
    for start in (0, 5, 10):
        errors = {row.policy: sum(row.errors) for row in rows[start : start + 5]}
        assert errors[ORACLE] < errors["random"]


def test_what_keeps_everything_is_not_measured_again(model):
    encoded = make(TASKS["passkey"], 1, 300, Bytes())
    contenders = [Contender("snapkv", 1000), Contender("snapkv", 60), Contender("full"), Contender("knorm", 1.0)]
    assert [contender.loses(300) for contender in contenders] == [False, True, False, False]
    one, two, three, four = try_policies(model, encoded, contenders, ["aware"], new_tokens=4, repeat=[])
    for row in (one, three, four):
        assert (row.held, row.kl, row.top1, row.nll_increase) == (1, 0, 1, 0) and row.errors == one.errors
    assert two.held < 0.5 and two.kl > 0


def test_the_question_counts_where_it_stood_in_the_prompt(model):
    encoded = make(TASKS["passkey"], 1, 300, Bytes())
    aware, agnostic = try_policies(
        model, encoded, [Contender("streaming", 60)], ["aware", "agnostic"], new_tokens=4, repeat=[]
    )
    asked, total = len(encoded.questions[0].tokens), len(encoded.context)
    assert agnostic.held / aware.held == pytest.approx((total + asked) / total)
    assert aware.dense_right == agnostic.dense_right == tuple(solved(model, encoded))


def test_costs_are_those_of_the_answer_over_what_is_left(model):
    encoded = make(TASKS["passkey"], 1, 300, Bytes())
    question = encoded.questions[0]
    [row] = try_policies(model, encoded, [Contender("streaming", 60)], ["agnostic"], new_tokens=4, repeat=[])
    costs = []
    start = OfflineCache(model)
    start.read(encoded.context)
    for cache in (start, start.compress(KVSparsity.named("streaming", budget=60))):
        hidden = cache.read([*question.tokens, *question.answer])[-len(question.answer) - 1 : -1]
        expected = model.logits(hidden).log_softmax(-1)
        costs.append(-float(expected[range(len(question.answer)), question.answer].mean()))
    assert row.nll_increase == pytest.approx(costs[1] - costs[0], abs=1e-4)
    assert row.answer_nll == pytest.approx(costs[1], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("snapkv", KVSparsity.named("snapkv", budget=99)),
        ("snapkv:window=8:sinks=2", KVSparsity.named("snapkv", budget=99, window=8, sinks=2)),
        ("novita:window=8:kernel_size=31", KVSparsity(SnapKV(8, 31), budget=99, window=8, first_full=3, every=256)),
        ("keydiff+ada", KVSparsity("keydiff", "ada", budget=99)),
        ("kvzip", KVSparsity(KVzip(), budget=99)),
        (ORACLE, KVSparsity(SnapKV(7, kernel_size=1), budget=99)),
    ],
)
def test_names_of_policies(name, policy):
    assert Contender(name, 99).policy(answer_tokens=7).key == policy.key


def row(seed, policy, top1, right, task="passkey", kept=None):
    return Row(task, seed, "aware", policy, 9, 0.5, 1 - top1, top1, 0.0, 1.0, right, (True, True), kept, [0.1])


def test_rows_are_summed_up_over_tasks_and_by_task():
    rows = []
    for seed in range(4):
        for policy, top1 in (("random", 0.2), ("snapkv", 0.6), (ORACLE, 1.0)):
            rows.append(row(seed, policy, top1 + 0.01 * seed, (seed > 1, True), kept=[[top1]]))
            rows.append(row(seed, policy, top1 / 2, (False, False), task="vt"))
            rows.append(row(seed, policy, 0.0, (False, False), task="text"))
    facts = {(cell["policy"], cell["task"]): cell for cell in summarise(rows, {"passkey"})}
    whole = facts["snapkv", "all"]
    assert whole["top1"] == pytest.approx((0.615 + 0.3) / 2)
    assert (whole["worst_task"], whole["worst_top1"]) == ("vt", pytest.approx(0.3))
    assert (whole["recall"], whole["n"]) == (pytest.approx(6 / 8), 8) and "recall" not in facts["snapkv", "vt"]
    assert whole["kept"] == pytest.approx(0.6) and whole["kept_of_oracle"] == pytest.approx(0.6)
    low, high = whole["kl_below_random"]
    assert low == pytest.approx((0.4 + 0.2) / 2) == high
    assert facts["snapkv", "text"]["perplexity"] == pytest.approx(2.71828, rel=1e-4)


def test_branches_are_drawn_from_the_prompt(model):
    cache = OfflineCache(model)
    cache.read(Bytes().encode("Once upon a time"))
    branches = sample(cache, 3, 10, seed=1)
    assert branches == sample(cache, 3, 10, seed=1) != sample(cache, 3, 10, seed=2)
    assert [len(branch) for branch in branches] == [10] * 3 and len({tuple(branch) for branch in branches}) == 3
    assert cache.length == 16


def test_as_many_random_tokens_keep_what_has_to_stay():
    policy = KVSparsity(budget=20, window=4, sinks=2)
    chosen = [[torch.arange(12), torch.arange(9)], None]
    [heads, whole] = random_like(chosen, policy, 40, seed=0)
    assert whole is None and [len(head) for head in heads] == [12, 9]
    for head in heads:
        assert head.tolist()[:2] == [0, 1] and head.tolist()[-4:] == [36, 37, 38, 39]


def test_what_branches_share(model):
    encoded = make(TASKS["niah_multikey"], 0, 400, Bytes())
    policy = KVSparsity.named("snapkv", budget=64, window=8)
    prompt = OfflineCache(model)
    prompt.read(encoded.context)
    [shared] = share(prompt, [question.tokens for question in encoded.questions], [policy], new_tokens=5)
    assert shared.union_tokens[0] == 64 and shared.union_tokens == sorted(shared.union_tokens)
    assert shared.union_tokens[-1] <= len(encoded.context) == shared.prompt_tokens
    assert 0 < shared.jaccard < 1 and list(shared.kl) == ["own", "sibling", "union", "random", "joint", "prompt"]
    assert shared.kl["joint"] not in (shared.kl["own"], shared.kl["sibling"], shared.kl["prompt"])
    [alone] = share(prompt, [encoded.questions[0].tokens] * 2, [policy], new_tokens=5)
    assert alone.kl["joint"] == alone.kl["own"], "branches that are alike choose what one of them would"
    [whole] = share(prompt, 3, [KVSparsity.named("snapkv", budget=500)], new_tokens=5)
    assert whole.jaccard == 1 and max(whole.kl.values()) < 1e-4 and set(whole.top1.values()) == {1.0}


@pytest.fixture
def run(capsys, monkeypatch, model):
    monkeypatch.setattr(model, "pack", lambda: None)
    monkeypatch.setattr(evaluate, "load_model", lambda name, **_: (model, Bytes()))

    def kv(*arguments):
        words = "--tokens 300 --seeds 2 --selection-seeds 1 --new-tokens 3 --branches 2 --task passkey,vt,text"
        main(["eval", "kv", *words.split(), *map(str, arguments)])
        return capsys.readouterr()

    return kv


def test_the_verb_writes_what_it_found(run, tmp_path):
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / f"found.{name}" for name in ("json", "png")}
    said = run("--policy", "knorm", "--budget", "60,0.5", "--json", files["json"], "--png", files["png"])
    result = json.loads(files["json"].read_text())
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    cells = [(cell["policy"], cell["budget"]) for cell in result["results"] if cell["task"] == "all"]
    others = [(name, budget) for name in ("random", "streaming", ORACLE, "knorm") for budget in (60, 0.5)]
    assert cells == [("full", None), *others] * 2
    assert {cell["mode"] for cell in result["results"]} == {"aware", "agnostic"}  # there is no second question
    assert set(result["solved_on_selection_seeds"]) == {"passkey", "vt", "text"}
    assert [(facts["kind"], facts["budget"]) for facts in result["branches"]] == [
        (kind, budget) for kind in ("questions", "samples") for budget in (60, 0.5)
    ]
    assert "knorm" in said.out and "100% done" in said.err


def test_texts_must_fit_twice_into_the_context(run):
    with pytest.raises(SystemExit):
        run("--tokens", 1025)


def test_baselines_are_always_there():
    study = Study(("snapkv", "random"), (64, 64))
    assert [contender.name for contender in study.contenders] == [*ALWAYS, "snapkv"]
    assert study.contenders[0].budget is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "newest"], "policy is 'newest'; choose one of"),
        (["--policy", "snapkv:window"], "policy: 'window' is not of the form field=number"),
        (["--policy", "snapkv:size=3"], "policy: 'size' is not one of scorer, allocator, budget"),
        (["--policy", "snapkv:kernel_size=4"], "kernel_size must be odd"),
        (["--budget", "many"], "budget: 'many' is neither a number of tokens nor a share"),
        (["--budget", "30"], "budget must be an integer of at least 37"),
        (["--task", "poems"], "tasks: 'poems' is not one of passkey"),
        (["--mode", "later"], "modes: 'later' is not one of aware, agnostic, next"),
        (["--branches", "1"], "branches must be an integer in [2, 8] or 0"),
        (["--tokens", "0"], "tokens must be an integer of at least 128"),
    ],
)
def test_mistakes_are_explained(capsys, arguments, message):
    with pytest.raises(SystemExit):
        main(["eval", "kv", *arguments])
    assert message in capsys.readouterr().err

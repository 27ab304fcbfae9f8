"""Weights of heads, found with a tiny model: heads that lose nothing give up their tokens, the same way every time."""

import json
from dataclasses import replace

import pytest
import torch
from tiny import Bytes, tiny_model

from treewise.cli import evaluate, main
from treewise.evaluate.calibrate import Calibration, learn, read_lesson, soft_divergence
from treewise.evaluate.study import SELECTION
from treewise.evaluate.tasks import TASKS, make
from treewise.evaluate.trial import Contender, try_policies
from treewise.sparsity import Calibrated, KVSparsity
from treewise.sparsity.select import ranked

POLICY = KVSparsity.named("induction", budget=60, window=8)


@pytest.fixture(scope="module")
def model():
    return tiny_model(windows=(None, 16, None), max_positions=2048)


@pytest.fixture(scope="module")
def lessons(model):
    return [read_lesson(model, make(TASKS[task], 7, 300, Bytes()), POLICY, 6) for task in ("passkey", "vt")]


def test_ranks_are_the_policys(model, lessons):
    lesson = lessons[0]
    assert [ranks is None for ranks in lesson.ranks] == [False, True, False]
    for ranks in (lesson.ranks[0], lesson.ranks[2]):
        assert ranks.sort(-1).values.tolist() == [[*range(1, lesson.length + 1)]] * 2
        assert sorted(ranks[0].argsort()[: POLICY.least(lesson.length)].tolist()) == [
            *range(4),
            *range(lesson.length - 8, lesson.length),
        ]
    assert torch.equal(ranked(-lesson.ranks[0]), lesson.ranks[0].argsort(-1))


def test_a_budget_beyond_all_tokens_is_the_dense_cache(model, lessons):
    for lesson in lessons:
        assert soft_divergence(model, lesson, torch.full((2, 2), 1e9)).abs().max() < 1e-4
        few, more = (soft_divergence(model, lesson, torch.full((2, 2), budget)).mean() for budget in (20.0, 150.0))
        assert few > more > 0


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_gradients_are_slopes(lessons, soft_cap):
    model = tiny_model(windows=(None, 16, None), max_positions=2048)
    model.config = replace(model.config, attention_soft_cap=soft_cap)
    lesson = read_lesson(model, make(TASKS["passkey"], 7, 300, Bytes()), POLICY, 6)
    budgets = torch.tensor([[30.0, 60.0], [90.0, 45.0]], requires_grad=True)
    [slopes] = torch.autograd.grad(soft_divergence(model, lesson, budgets).sum(), [budgets])
    for place in ((0, 0), (1, 1)):
        step = torch.zeros(2, 2)
        step[place] = 2.0
        with torch.no_grad():
            rise = [float(soft_divergence(model, lesson, budgets + sign * step).sum()) for sign in (1, -1)]
        assert float(slopes[place]) == pytest.approx((rise[0] - rise[1]) / 4, rel=0.1, abs=1e-5)


def test_heads_whose_values_say_nothing_give_up_their_tokens(lessons):
    model = tiny_model(windows=(None, 16, None), max_positions=2048)
    dim = model.config.head_dim
    output = dict(model.named_parameters())["layers.2.attention.output.weight"]
    output[:, : 3 * dim] = 0  # what the first KV head of the last layer finds
    own = [read_lesson(model, make(TASKS[task], 7, 300, Bytes()), POLICY, 6) for task in ("passkey", "vt")]
    weights = learn(model, own, POLICY, 30)
    assert weights.shape == (2, 2) and weights.mean() == pytest.approx(1)
    assert weights.argmin() == 2


def test_calibration_is_the_same_every_time_and_never_sees_texts_of_a_study(model, monkeypatch):
    seeds = []

    def note(task, seed, tokens, tokenizer):
        seeds.append(seed)
        return make(task, seed, tokens, tokenizer)

    monkeypatch.setattr("treewise.evaluate.calibrate.make", note)
    calibration = Calibration(tasks=("passkey", "vt"), tokens=200, seeds=2, steps=12, new_tokens=4)
    done = []
    one, other = (calibration.run(model, Bytes(), done.append) for _ in range(2))
    assert one == other and done == [*(["passkey", "vt"] * 2 + ["learning"] * 12)] * 2
    assert len({*seeds}) == 2 and min(seeds) > SELECTION + 10_000
    assert len(one["divergence"]) == 12 and Calibrated(tuple(map(tuple, one["weights"])))


@pytest.fixture
def run(monkeypatch, model, tmp_path):
    monkeypatch.setattr(evaluate, "load_model", lambda name, **_: (model, Bytes()))
    return lambda *arguments: main(["eval", "heads", "--json", str(tmp_path / "heads.json"), *arguments])


def test_what_the_verb_writes_is_an_allocator(run, tmp_path, model, capsys):
    settings = {"budget": 50, "tokens": 200, "seeds": 1, "steps": 3, "new-tokens": 3, "task": "passkey"}
    run(*(f"--{name}={value}" for name, value in settings.items()))
    said = capsys.readouterr().out
    assert "head 0" in said and "head 1" in said
    weights = json.loads((tmp_path / "heads.json").read_text())["weights"]
    contender = Contender(f"induction+{tmp_path}/heads.json:window=8", 50)
    assert contender.policy().allocation == Calibrated(tuple(map(tuple, weights)))
    [row] = try_policies(
        model, make(TASKS["passkey"], 1, 300, Bytes()), [contender], ["aware"], new_tokens=3, repeat=[]
    )
    assert row.held < 1 and row.kl > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "newest"], "policy is 'newest'; choose one of"),
        (["--task", "poems"], "tasks: 'poems' is not one of passkey"),
        (["--steps", "0"], "steps must be an integer of at least 1"),
        (["--budget", "20"], "budget must be an integer of at least 21"),
        (["--tokens", "4000"], "tokens must be an integer in [128, 1920]"),
        (["--policy", "kvzip"], "queries: kvzip needs those of a second pass"),
    ],
)
def test_mistakes_are_explained(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert message in capsys.readouterr().err

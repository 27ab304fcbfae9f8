"""What policies lose on real models: by the offline harness over budgets, and over windows and numbers of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from io import BytesIO
from statistics import fmean
from typing import Any

from treewise.bench.runs import Facts
from treewise.evaluate.curves import draw
from treewise.evaluate.study import Study, countable
from treewise.evaluate.summary import BASELINE, summarise
from treewise.evaluate.trial import MODES, ORACLE, Row
from treewise.models import CausalLM, Tokenizer, load_model
from treewise.models.load import load_config
from treewise.reproduce.figures import drawn
from treewise.reproduce.report import Cell, Figure, Section, Table
from treewise.reproduce.study import Measurement, Results

POLICIES = (
    "novita:window=8",
    "snapkv:window=8",
    "snapkv",
    "pyramidkv:window=8",
    "adakv:window=8",
    "h2o",
    "tova",
    "keydiff",
    "knorm",
    "expected_attention",
    "keyformer",
    "pyramidinfer",
    "rkv",
    "kvzip",
    "induction",
)
"""Compared over budgets; those of `treewise.evaluate.study.ALWAYS` come with them."""
QUICK_POLICIES = ("novita:window=8", "snapkv:window=8", "pyramidkv:window=8", "keydiff")
"""The same, for a first look."""

LOSSES = ("KL, nats", "top-1", "95 %", "NLL +, nats", "recall", "of", "needle kept", "worst task", "its top-1")
COLUMNS = ("budget", "policy", "held", *LOSSES)

RATE = 100.0
"""Tokens a second that the harness gets through on a core, for a model of 135 million weights."""

QUESTION_WINDOW = 8
"""Window of policies that look at the question: those of the harness have 12 to 28 tokens."""

SPARSE_LAYERS = (22 / 32, 26 / 32, 31 / 32)
"""The follow-up's numbers of sparse layers, of the 32 of its model."""


@dataclass(frozen=True)
class Quality:
    """A comparison on one model, a text at a time.

    Attributes
    ----------
    name : str
        First part of the names of its measurements.
    model : str
        What `load_model` takes.
    study : Study
    """

    name: str
    model: str
    study: Study

    def measure(self, task: str) -> Facts:
        """Measure every text of a task.

        Returns
        -------
        dict
            What it depends on; ``solved``, the share of its answers that the dense cache finds in other texts; and
            ``rows``, the fields of each `Row`, to four digits, of ``kept`` and ``errors`` the means only.
        """
        loaded = packed(self.model)
        rows = [row for seed in range(self.study.seeds) for row in self.study.try_text(*loaded, task, seed)]
        return {**self.settings(task), "solved": self.study.solved(*loaded, task), "rows": list(map(short, rows))}

    def settings(self, task: str) -> Facts:
        """Return what the result of a task depends on."""
        layers = load_config(self.model).num_layers
        return {"model": self.model, "layers": layers, "task": task, **asdict(self.study)}

    def measurements(self) -> list[Measurement]:
        """Return what there is to measure, a task each."""
        study = self.study
        seconds = (study.selection_seeds * study.tokens + study.seeds * study.trial_tokens) / RATE
        return [
            Measurement(
                f"{self.name}-{task}", f"{self.name}, {task}", seconds, partial(self.measure, task), self.settings(task)
            )
            for task in study.tasks
        ]


def short(row: Row) -> Facts:
    """Return the fields of a row, of what is said by layer and head the mean."""
    kept = None if row.kept is None else [[fmean(fmean(heads) for heads in row.kept)]]
    facts = asdict(replace(row, kept=kept, errors=[fmean(row.errors)]))
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in facts.items()}


@cache
def packed(name: str) -> tuple[CausalLM, Tokenizer]:
    """Load a model once, in float32 on the CPU, laid out for fast products."""
    model, tokenizer = load_model(name, dtype="float32", device="cpu")
    model.pack()
    return model, tokenizer


def sparse_layers(num_layers: int) -> dict[int, int]:
    """Return for each number of sparse layers of the follow-up the same share of a model's layers.

    Examples
    --------
    >>> sparse_layers(30)
    {22: 21, 26: 24, 31: 29}
    """
    return {round(32 * share): round(share * num_layers) for share in SPARSE_LAYERS}


def grid_policies(num_layers: int) -> tuple[str, ...]:
    """Return for each number of `sparse_layers` the policy in which only these are sparse."""
    sparse = sparse_layers(num_layers).values()
    return tuple(f"novita:first_full={num_layers - own}:window={QUESTION_WINDOW}" for own in sparse)


def full_layers(policy: str) -> int:
    """Return how many layers are full in a policy of `grid_policies`."""
    return int(policy.split(":")[1].removeprefix("first_full="))


def summary(results: Results, name: str) -> tuple[Facts, list[Facts]] | None:
    """Sum up the tasks of a comparison that were measured: what they depend on, and what `summarise` returns."""
    found = [result for key, result in results.items() if key.startswith(f"{name}-") and "rows" in result]
    if not found:
        return None
    rows = [Row(**row) for each in found for row in each["rows"]]
    return found[0], summarise(rows, countable({each["task"]: each["solved"] for each in found}))


def policies_section(results: Results, published: Mapping[str, Any]) -> Section:
    """Report what policies lose over budgets, which is what the account's tables 2 and 3 are about."""
    heading = "What policies lose over budgets"
    lead = (
        "Without any data: texts with something hidden in them, and a question, read by a real model; every policy is "
        "compared with the same model's dense cache (`treewise eval kv`). KL and top-1 agreement are over the dense "
        "cache's own continuation, teacher-forced; NLL is what a token of the right answer costs more; recall counts "
        "parts of answers that the dense cache has right. `held` is bytes held over those of a dense cache, over "
        "**all** layers, positions included. The oracle knows what the answer will look at, and random is chance."
    )
    if (summed := summary(results, "policies")) is None:
        return Section(heading, lead + "\n\nNothing was measured.")
    facts, cells = summed
    lead += (
        f"\n\n{facts['model']} in float32 on a CPU, texts of {facts['tokens']} tokens, {facts['seeds']} of each task: "
        "what lies within the intervals of another says little. Questions have 12 to 28 tokens, so that a window of 32 "
        "looks at filler too. Published, for questions after compression, is the order kvzip, expected attention with "
        "budgets by head, keydiff, snapkv, knorm, random; why it differs on these texts is in the documentation, *What "
        "KV sparsity loses*."
    )
    parts: list[Table | Figure] = []
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        whole = [cell for cell in cells if (cell["mode"], cell["task"]) == (mode, "all") and cell["policy"] != "full"]
        whole.sort(key=lambda cell: (cell["budget"], -cell["top1"]))
        parts.append(
            Table(
                f"Policies, {mode}",
                COLUMNS,
                list(map(_line, whole)),
                f"{mode}: {MODES[mode]}. Budget: share of the tokens that a sparse layer keeps. 95 %: bootstrap "
                "interval of top-1 over seeds.",
            )
        )
    parts += drawn(
        "Policies over bytes held",
        partial(_curves, facts, cells),
        "KL, top-1 agreement and recall over the share of bytes held, a line a policy, a row a way to ask.",
        "Bands are bootstrap intervals over seeds.",
    )
    return Section(heading, lead + "\n\n" + _verdict(cells, published["account"]), parts)


def _curves(facts: Facts, cells: Sequence[Facts]) -> bytes:
    picture = BytesIO()
    draw({**facts, "results": cells}, picture)
    return picture.getvalue()


def _line(cell: Facts) -> list[Cell]:
    low, high = cell["top1_interval"]
    return [
        cell["budget"],
        cell["policy"],
        cell["held"],
        cell["kl"],
        cell["top1"],
        f"{low:.2f}–{high:.2f}",
        cell["nll_increase"],
        cell.get("recall"),
        cell.get("n"),
        cell.get("kept"),
        cell["worst_task"],
        cell["worst_top1"],
    ]


def loss_of_question(cells: Iterable[Facts]) -> dict[tuple[str, float], tuple[float, float]]:
    """Return top-1 agreement of each policy and budget with the question in the prompt, and asked after compression."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for cell in cells:
        if cell["task"] == "all" and cell["budget"] is not None:
            found.setdefault((cell["policy"], cell["budget"]), {})[cell["mode"]] = cell["top1"]
    return {key: (own["aware"], own["agnostic"]) for key, own in found.items() if {"aware", "agnostic"} <= own.keys()}


def _verdict(cells: Sequence[Facts], account: Mapping[str, Any]) -> str:
    lines = []
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        for budget in sorted({cell["budget"] for cell in cells if cell["budget"] is not None}):
            own = [
                cell
                for cell in cells
                if (cell["mode"], cell["task"], cell["budget"]) == (mode, "all", budget) and cell["policy"] != ORACLE
            ]
            own.sort(key=lambda cell: -cell["top1"])
            chance = next(cell["top1"] for cell in own if cell["policy"] == BASELINE)
            above = [cell["policy"] for cell in own if cell["top1"] > chance]
            best = own[0]
            lines.append(
                f"- {mode}, budget {budget:g}: the best is {best['policy']} with a top-1 agreement of "
                f"{best['top1']:.2f} (worst task {best['worst_task']}, {best['worst_top1']:.2f}); "
                f"{len(above)} of {len(own) - 1} are above random, {chance:.2f}"
            )
    lines.append(
        f"\nPublished: a loss of {account['mmlu_loss_at_most']:.0%} at most on MMLU and of about "
        f"{account['long_questions_loss']:.0%} on questions about long documents at more than "
        f"{account['long_questions_compression']} times compression, of another model and other tasks: these are no "
        "numbers to divide ours by."
    )
    return "\n".join(lines)


def grid_section(results: Results, published: Mapping[str, Any]) -> Section:
    """Report what windows and numbers of sparse layers lose, beside the follow-up's grid."""
    theirs = published["follow_up"]
    heading = "Windows and numbers of sparse layers"
    lead = (
        f"The follow-up's two settings, {theirs['source']}: how many layers are sparse, and how many tokens these "
        "keep. Its windows are numbers of tokens, for prompts whose lengths it does not give; ours are shares of the "
        "text. The full layers come first, as many of the model's as there."
    )
    scores = Table(
        "Published: MMLU-Pro",
        [f"sparse layers of {theirs['layers']}", *(f"window {window:,}" for window in theirs["windows"])],
        [[int(sparse), *(score / theirs["dense"] for score in own)] for sparse, own in theirs["sparse"].items()],
        f"Accuracy over that of the dense cache, {theirs['dense']}; another model and another task than below.",
    )
    if (summed := summary(results, "grid")) is None:
        return Section(heading, lead + "\n\nNothing was measured.", [scores])
    facts, cells = summed
    own = list(zip(facts["policies"], theirs["sparse"], strict=True))
    parts: list[Table | Figure] = [scores]
    for mode in dict.fromkeys(cell["mode"] for cell in cells):
        whole = [cell for cell in cells if (cell["mode"], cell["task"]) == (mode, "all")]
        table = {(cell["policy"], cell["budget"]): cell for cell in whole}
        budgets = sorted(facts["budgets"], reverse=True)
        for measure, words in (("top1", "top-1 agreement"), ("kl", "KL, nats"), ("held", "bytes held")):
            parts.append(
                Table(
                    f"Ours, {mode}: {words}",
                    ["sparse layers", "that is, of 32", *(f"window {budget:.4g} of the text" for budget in budgets)],
                    [
                        [facts["layers"] - full_layers(name), int(sparse)]
                        + [table[name, budget][measure] for budget in budgets]
                        for name, sparse in own
                    ],
                    f"{facts['model']}, {facts['layers']} layers; {mode}: {MODES[mode]}.",
                )
            )
    return Section(heading, lead, parts)

"""What policies lose on real models: by the offline harness over budgets, and over windows and numbers of layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from io import BytesIO
from typing import Any

from treewise.bench.runs import Facts
from treewise.evaluate.curves import draw
from treewise.evaluate.study import Study, countable
from treewise.evaluate.summary import summarise
from treewise.evaluate.trial import Row
from treewise.models import CausalLM, Tokenizer, load_model

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

QUESTION_WINDOW = 8
"""Window of policies that look at the question: those of the harness have 12 to 28 tokens."""

SPARSE_LAYERS = (22 / 32, 26 / 32, 31 / 32)
"""The follow-up's numbers of sparse layers, of the 32 of its model."""


@dataclass(frozen=True)
class Quality:
    """A comparison on one model, a text at a time.

    Attributes
    ----------
    model : str
        What `load_model` takes.
    study : Study
    """

    model: str
    study: Study

    def measure(self, task: str) -> Facts:
        """Measure every text of a task.

        Returns
        -------
        dict
            ``solved``, the share of its answers that the dense cache finds in other texts, and ``rows``, the fields of
            each `Row`.
        """
        loaded = packed(self.model)
        rows = [row for seed in range(self.study.seeds) for row in self.study.try_text(*loaded, task, seed)]
        return {"solved": self.study.solved(*loaded, task), "rows": [asdict(row) for row in rows]}

    def seconds(self, rate: float) -> float:
        """Estimate what a task takes on a machine that reads `rate` tokens a second."""
        study = self.study
        return (study.selection_seeds * study.tokens + study.seeds * study.trial_tokens) / rate


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


def grid_policies(num_layers: int) -> dict[int, str]:
    """Return for each number of sparse layers the policy in which only these are sparse."""
    return {
        sparse: f"novita:first_full={num_layers - own}:window={QUESTION_WINDOW}"
        for sparse, own in sparse_layers(num_layers).items()
    }


def summary(measured: Iterable[Mapping[str, Any]]) -> list[Facts]:
    """Sum up what `Quality.measure` returned of some tasks; see `summarise`."""
    found = list(measured)
    rows = [Row(**row) for each in found for row in each["rows"]]
    return summarise(rows, countable({each["rows"][0]["task"]: each["solved"] for each in found}))


def curves(name: str, study: Study, cells: Sequence[Facts]) -> bytes:
    """Draw what policies lose over what they hold, a PNG."""
    picture = BytesIO()
    draw({"model": name, "tokens": study.tokens, "seeds": study.seeds, "results": cells}, picture)
    return picture.getvalue()

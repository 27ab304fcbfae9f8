"""`treewise reproduce report`: writes a report again from what was measured."""

from __future__ import annotations

from pathlib import Path

from treewise.reproduce.deft import study as deft
from treewise.reproduce.sparsity import study as sparsity
from treewise.reproduce.study import read_records, write_report

STUDIES = {"deft": (deft.TITLE, deft.report), "sparsity": (sparsity.TITLE, sparsity.report)}
"""Title and sections of each study, by its name in the records."""


def report(out: Path, /) -> None:
    """Write the report in a folder again, from all results in its `raw`, whichever machines they are from.

    Parameters
    ----------
    out
        The folder of a report.
    """
    records = read_records(out)
    title, sections = STUDIES[next(iter(records.values()))["study"]]
    write_report(title, sections, records, out)
    print(out / "report.html", flush=True)

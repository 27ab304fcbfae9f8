"""Fill the README's numbers in from the kept reports, so that they are what was measured.

`python benchmarks/readme_numbers.py` rewrites what stands between `<!-- numbers: NAME -->` and `<!-- /numbers -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from treewise.reproduce.deft import published
from treewise.reproduce.deft.runs import Totals
from treewise.reproduce.deft.tables import sign
from treewise.reproduce.study import Results, read_records

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "docs" / "reports"
BLOCK = re.compile(r"(<!-- numbers: (\w+) -->\n)(.*?)(<!-- /numbers -->)", re.DOTALL)


def deft(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sum the report of the DeFT paper up: how much faster flatten is than Radix, by what is counted."""
    results: Results = {key: record["result"] for key, record in records.items()}
    totals = Totals(results)
    attention, forward, loop = {}, {}, {}
    for workload in published.COLUMNS:
        methods = results.get(f"attention-{workload}", {}).get("methods", {})
        seconds = [methods.get(method, {}).get("seconds") for method in ("radix", "deft:flatten")]
        if None not in seconds:
            attention[workload] = seconds[0] / seconds[1]
        radix, flatten = totals.whole(workload, "radix"), totals.whole(workload, "deft:flatten")
        if radix is not None and flatten is not None:
            forward[workload] = radix.forward / flatten.forward
            loop[workload] = radix.loop / flatten.loop
    said = {
        name: {workload: table["radix"][workload] / table["deft:flatten"][workload] for workload in published.COLUMNS}
        for name, table in (("attention", published.ATTENTION_SECONDS), ("forward", published.DECODE_SECONDS))
    }
    device = records[next(key for key in records if key.startswith("attention-"))]["machine"]["device"]
    lines = [
        f"| Radix over DeFT-Flatten, mean (least to most) | the paper, A100 | treewise, {device} | same sign |",
        "|---|---|---|---|",
    ]
    for what, ours, theirs in (
        ("attention", attention, said["attention"]),
        ("forwards", forward, said["forward"]),
        ("whole loop", loop, published.LOOP_SPEEDUP),
    ):
        if not ours:
            continue
        both = [workload for workload in theirs if workload in ours]
        agreeing = sum(sign(ours[workload], theirs[workload]) != "✗" for workload in both)
        cells = [_spread([side[workload] for workload in both]) for side in (theirs, ours)]
        lines.append(f"| {what}, {len(both)} workloads | {cells[0]} | {cells[1]} | {agreeing} of {len(both)} |")
    return lines


def _spread(ratios: list[float]) -> str:
    return f"{geometric_mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


BLOCKS: dict[str, tuple[str, Callable[[Mapping[str, Mapping[str, Any]]], list[str]]]] = {"deft": ("deft_h200", deft)}
"""By name of the block: the folder of the report, and what makes lines of its records."""


def fill(text: str, reports: Path = REPORTS) -> str:
    """Return the text with every block filled in; a block whose report is not there is empty."""

    def filled(block: re.Match[str]) -> str:
        folder, lines = BLOCKS[block[2]]
        made = lines(read_records(reports / folder)) if (reports / folder / "raw").is_dir() else []
        return block[1] + "".join(f"{line}\n" for line in made) + block[4]

    return BLOCK.sub(filled, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text("utf-8")), encoding="utf-8")

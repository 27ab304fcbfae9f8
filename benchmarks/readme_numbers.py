"""Fill the README's numbers in from the kept reports, so that they are what was measured.

`python benchmarks/readme_numbers.py` rewrites what stands between `<!-- numbers: NAME -->` and `<!-- /numbers -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from treewise.reproduce.deft import published
from treewise.reproduce.deft.runs import Totals
from treewise.reproduce.deft.tables import sign
from treewise.reproduce.sparsity import study
from treewise.reproduce.sparsity.serving import DENSE, Cell, fits
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


def sparsity(records: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sum the report of KV sparsity up: tokens a second and the first token, dense and sparse, in both pools."""
    cells = {cell: record["result"] for key, record in records.items() if (cell := Cell.of(key)) is not None}
    measured = {cell: result for cell, result in cells.items() if "ttft_s" in result}
    if not measured:
        return []
    published = study.published()["account"]["times_dense"]
    device = next(records[cell.key]["machine"]["device"] for cell in measured)
    lines = [
        f"| {device}, requests at a time | dense, tokens/s | `novita` | times | published "
        "| first token, dense | `novita` |",
        "|---|---|---|---|---|---|---|",
    ]
    for dense in sorted(measured, key=lambda cell: (cell.pool != "starved", cell.level)):
        sparse = replace(dense, engine="novita")
        if dense.engine == DENSE and sparse in measured:
            speeds = [measured[cell]["tokens_per_s"] for cell in (dense, sparse)]
            waits = [measured[cell]["ttft_s"]["p50"] for cell in (dense, sparse)]
            said = "" if fits(dense, measured[dense]) else f"{published}, RTX 4090"
            lines.append(
                f"| {dense.level}, {dense.pool} pool | {speeds[0]:,.0f} | {speeds[1]:,.0f} "
                f"| {speeds[1] / speeds[0]:.2f} | {said} | {waits[0]:.2f} s | {waits[1]:.2f} s |"
            )
    return lines


BLOCKS: dict[str, tuple[str, Callable[[Mapping[str, Mapping[str, Any]]], list[str]]]] = {
    "deft": ("deft_h200", deft),
    "sparsity": ("sparsity_h200", sparsity),
}
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

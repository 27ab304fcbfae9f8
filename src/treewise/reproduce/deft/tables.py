"""Tables of seconds by workload and method, beside what was published, and whether both rank methods alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from treewise.reproduce.deft.published import COLUMNS
from treewise.reproduce.deft.workloads import METHODS, TITLES
from treewise.reproduce.report import Cell, Compared, Figure, Table, ratio

EQUAL = 0.03
"""Two methods whose times differ by less than this share are as fast as each other."""
KINDS = {
    "few-shot prompts": [name for name in TITLES if name.startswith("few-shot")],
    "reasoning": ["sorting", "document", "keyword", "set"],
    "speculation, star": [name for name in TITLES if name.startswith("star")],
    "speculation, real topology": [name for name in TITLES if name.startswith("real")],
}
NAMES = {
    "flash_decoding": "Flash-Decoding",
    "medusa": "Medusa",
    "specinfer": "SpecInfer",
    "radix": "Radix",
    "deft:node": "DeFT-Node",
    "deft:node_chunk": "DeFT-Node-Chunk",
    "deft:flatten": "DeFT-Flatten",
}

Seconds = Mapping[str, Mapping[str, float | str | None]]
"""By workload and method; a word such as ``"OOM"`` where there is no time."""


def sign(ours: float | None, published: float | None) -> str:
    """Say whether two ratios lie on the same side of one.

    Examples
    --------
    >>> sign(1.5, 3.0), sign(0.8, 1.2), sign(1.01, 2.0), sign(None, 2.0)
    ('✓', '✗', '≈', '')
    """
    if ours is None or published is None:
        return ""
    if min(abs(ours - 1), abs(published - 1)) < EQUAL:
        return "≈"
    return "✓" if (ours > 1) == (published > 1) else "✗"


def against_flatten(
    title: str, seconds: Seconds, published: Mapping[str, Mapping[str, float | None]]
) -> list[Table | Figure]:
    """Make a table a kind of workload: a row a workload and method."""
    tables: list[Table | Figure] = []
    for kind, workloads in KINDS.items():
        rows: list[Sequence[Cell]] = []
        for workload in workloads:
            for method in METHODS:
                if method not in seconds.get(workload, {}):
                    continue
                ours = seconds[workload][method]
                said: float | str | None = published.get(method, {}).get(workload)
                over = ratio(ours, seconds[workload].get("deft:flatten"))
                said_over = ratio(said, published["deft:flatten"].get(workload))
                if method in published and said is None and workload in COLUMNS:
                    said = "OOM"
                names = TITLES[workload], NAMES[method]
                rows.append(
                    [
                        *names,
                        Compared(ours, said),
                        Compared(over, said_over),
                        "" if method == "deft:flatten" else sign(over, said_over),
                    ]
                )
        if rows:
            columns = ["workload", "method", "seconds", "over flatten", "sign"]
            tables.append(Table(f"{title}: {kind}", columns, rows))
    return tables


def disagreements(
    seconds: Seconds, published: Mapping[str, Mapping[str, float | None]]
) -> list[tuple[str, str, float, float]]:
    """List workload, method, our ratio to flatten and the published one, where the two contradict each other."""
    found = []
    for workload, methods in seconds.items():
        for method in methods:
            ours = ratio(methods[method], methods.get("deft:flatten"))
            said = ratio(published.get(method, {}).get(workload), published["deft:flatten"].get(workload))
            if ours is not None and said is not None and sign(ours, said) == "✗":
                found.append((workload, method, ours, said))
    return found

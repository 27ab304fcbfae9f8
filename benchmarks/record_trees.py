"""Make the file of recorded trees that benchmarks replay from a checkout of the DeFT authors' repository.

`git clone https://github.com/LINs-lab/DeFT`, then `python benchmarks/record_trees.py DeFT ../shared/data`. The
recordings are theirs, under the MIT licence. Texts are left out: the shapes are the work.
"""

from __future__ import annotations

import argparse
import gzip
import json
from itertools import islice
from pathlib import Path
from typing import Any

TASKS = {"sorting": "sorting128ToT", "document": "docmergeToT", "keyword": "keywordToT", "set": "set128ToT"}
TREES = 10
"""Of each task, the first complete ones: those that the paper's tables are means of."""
SIZES = (32, 64, 128, 256)
PROMPT = 1016
"""Tokens of the one prompt that speculation was recorded on, in Llama-3's tokenizer."""


def read(checkout: Path) -> dict[str, Any]:
    """Read the shapes of trees, of drafted trees, and the accepted lengths; see `treewise.replay` for the form."""
    folder = checkout / "dataset" / "generation"
    reasoning = {}
    for task, name in TASKS.items():
        recorded = json.loads((folder / "Reasoning" / f"{name}.json").read_text("utf-8"))
        complete = (tree["data"] for tree in recorded if not tree["incompleted"])
        reasoning[task] = [
            [
                [node["start"], node["end"], node["children"]]
                for node in sorted(nodes.values(), key=lambda node: node["id"])
            ]
            for nodes in islice(complete, TREES)
        ]
    drafted = {
        size: json.loads((folder / "Speculative_Decoding" / f"APPS_tree_size{size}.json").read_text("utf-8"))
        for size in SIZES
    }
    return {
        "about": "Shapes recorded by the authors of DeFT (LINs-lab/DeFT, MIT licence), without their texts.",
        "reasoning": reasoning,
        "speculative": {
            "topologies": {str(size): record["Tree_Structure"] for size, record in drafted.items()},
            "accepted_lengths": drafted[SIZES[0]]["Records"][0]["Accept_length"],  # the same for all sizes
            "prompt_tokens": PROMPT,
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="of LINs-lab/DeFT")
    parser.add_argument("out", type=Path, help="folder of deft_trees.json.gz")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "deft_trees.json.gz"
    file.write_bytes(gzip.compress(json.dumps(read(arguments.checkout), separators=(",", ":")).encode(), mtime=0))
    print(file)

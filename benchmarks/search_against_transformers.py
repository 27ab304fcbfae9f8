"""Time search programs on a CPU against the same calls of Transformers' `generate`, the text sent anew for each node.

    python benchmarks/search_against_transformers.py [--out result.json]

Each strategy runs once on treewise. What it decoded is then decoded again by Transformers: one call of `generate` for
each place where the tree branches, with the whole text up to there as its prompt, as many sequences as there are
branches, and as many tokens as the longest of them. What programs score (votes, values) is left out for Transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from treewise import LLM
from treewise.bench.measure import describe_machine
from treewise.models.load import locate
from treewise.results import Tree
from treewise.search import STRATEGIES

WORKED = """Question: A box holds {a} pencils. How many pencils are in {b} boxes?
Answer: One box holds {a} pencils. {b} boxes hold {a} times {b}, which is {c}. The answer is {c}.

"""
QUESTION = "Question: A pizza costs 9 dollars and a drink costs 3 dollars. What do 4 pizzas and 2 drinks cost?\nAnswer:"
RUNS = {
    "best_of_n": {"n": 16, "max_tokens": 48, "temperature": 0.7},
    "tot": {"depth": 3, "width": 4, "beam": 3, "evaluate": "logprob"},
    "mcts": {"iterations": 24},
}


def calls(tree: Tree) -> list[tuple[list[int], int, int]]:
    """List what has to be generated: the text before, how many sequences, and the tokens of the longest."""
    before: dict[int | None, list[int]] = {None: []}
    longest: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for node in tree.nodes:  # parents first
        path = before[node.parent]
        before[node.id] = path + node.token_ids
        given = sum(logprob is None for logprob in node.logprobs)
        if given < len(node.token_ids):
            longest[tuple(path + node.token_ids[:given])].append(len(node.token_ids) - given)
    return [(list(text), len(lengths), max(lengths)) for text, lengths in longest.items()]


@torch.inference_mode()
def main() -> None:
    """Run each strategy on both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    logging.set_verbosity_error()
    llm = LLM("smollm2-135m", device="cpu", dtype="float32", enable_prefix_caching=False)
    theirs = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m"), dtype=torch.float32).eval()
    prompt = (
        "".join(WORKED.format(a=a, b=b, c=a * b) for a, b in ((12, 3), (7, 5), (20, 4), (9, 6), (15, 2))) + QUESTION
    )
    rows = []
    for name, settings in RUNS.items():
        program = STRATEGIES[name].build(**settings)
        llm.run(program, [prompt], seed=1)  # both are warm
        start = time.perf_counter()
        [result] = llm.run(program, [prompt], seed=0)
        ours = time.perf_counter() - start
        wanted = calls(result.tree)
        theirs.generate(torch.tensor([wanted[0][0]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
        start = time.perf_counter()
        for text, sequences, tokens in wanted:
            theirs.generate(
                torch.tensor([text]),
                num_return_sequences=sequences,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        decoded = sum(sum(logprob is not None for logprob in node.logprobs) for node in result.tree.nodes)
        rows.append(
            {
                "strategy": name,
                "settings": settings,
                "prompt_tokens": result.tree.usage.prompt_tokens,
                "nodes": len(result.tree.nodes),
                "tokens": decoded,
                "steps": result.tree.usage.steps,
                "rows_a_step": round(result.tree.usage.rows / result.tree.usage.steps, 2),
                "treewise_s": round(ours, 3),
                "transformers_s": round(seconds, 3),
                "transformers_calls": len(wanted),
                "ratio": round(seconds / ours, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        machine = describe_machine(torch.device("cpu"))
        options.out.write_text(json.dumps({"bench": "search", "machine": machine, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Time search programs on a CPU against the same programs over Transformers, which send the text anew for each node.

    python benchmarks/search_against_transformers.py [--prompt steps] [--repeats 3] [--threads 2] [--out result.json]

Two prompts: `steps` has examples that are worked out in several lines, each of which is a thought; those of `line` are
one line, so that most thoughts are whole answers and trees stay small.

What a run of a strategy decoded and scored on treewise is done again by Transformers, in two ways:

- one call of `generate` for each node, with the node's whole text as its prompt and as many new tokens as the node has;
- siblings in one call: `num_return_sequences` of as many tokens as the longest of them, which a program can do where it
  knows beforehand how often a text is continued.

Where the strategy asks for the likelihood of answers (values, votes), both ways make one forward of the whole text for
each question, or for each answer where answers have several tokens. All three take turns; the times are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from recorded_search import Call, recorded
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from treewise import LLM
from treewise.bench.measure import describe_machine
from treewise.bench.shares import timed_parts
from treewise.models.load import locate
from treewise.search import STRATEGIES

QUESTION = "Question: A pizza costs 9 dollars and a drink costs 3 dollars. What do 4 pizzas and 2 drinks cost?\nAnswer:"
LINE = """Question: A box holds {a} pencils. How many pencils are in {b} boxes?
Answer: One box holds {a} pencils. {b} boxes hold {a} times {b}, which is {c}. The answer is {c}.

"""
STEPS = """Question: A box costs {a} dollars and a ruler costs {d} dollars. What do {b} boxes and a ruler cost?
Answer:
One box costs {a} dollars.
{b} boxes cost {b} * {a} = {c} dollars.
With the ruler that is {c} + {d} = {e} dollars.
The answer is {e}.

"""
PROMPTS = {
    "line": "".join(LINE.format(a=a, b=b, c=a * b) for a, b in ((12, 3), (7, 5), (20, 4), (9, 6), (15, 2))) + QUESTION,
    "steps": "".join(
        STEPS.format(a=a, b=b, c=a * b, d=d, e=a * b + d) for a, b, d in ((12, 3, 4), (7, 5, 2), (20, 4, 9))
    )
    + f"{QUESTION}\n",
}
RUNS = {
    "best_of_n": {"n": 16, "max_tokens": 24},
    "tot": {"depth": 3, "width": 4, "beam": 3, "answer_tokens": 24},
    "mcts": {"iterations": 16, "answer_tokens": 24},
}
SEED = 1
"""With it no strategy finds the first thoughts of `line` to be whole answers already, and so ends at once."""


def together(calls: Sequence[Call]) -> list[Call]:
    """Join the calls that continue one text, as long as the longest."""
    lengths: dict[Sequence[int], list[int]] = defaultdict(list)
    for call in calls:
        lengths[call.text].append(call.tokens)
    return [Call(text, max(tokens), len(tokens)) for text, tokens in lengths.items()]


def again(model: PreTrainedModel, calls: Sequence[Call]) -> None:
    """Make calls over Transformers."""
    for text, tokens, sequences in calls:
        if tokens:
            model.generate(
                torch.tensor([text]),
                num_return_sequences=sequences,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=True,
                temperature=0.8,
                top_k=0,
                top_p=0.95,
                pad_token_id=0,
            )
        else:
            model(torch.tensor([text]), logits_to_keep=1).logits.log_softmax(-1)


def seconds(run: Callable[[], Any]) -> tuple[float, float]:
    """Time a call by the clock on the wall, and the processor time of all threads."""
    start = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def shares(run: Callable[[], Any]) -> dict[str, float]:
    """Tell which part of the time goes into matrix products and which into attention."""
    with timed_parts() as spent:
        whole, _ = seconds(run)
    return {kind: round(part / whole, 3) for kind, part in spent.items()}


@torch.inference_mode()
def main() -> None:
    """Run each strategy on both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", choices=PROMPTS, default="steps")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.set_verbosity_error()
    llm = LLM("smollm2-135m", device="cpu", dtype="float32", enable_prefix_caching=False)
    theirs = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m"), dtype=torch.float32).eval()
    prompt = PROMPTS[options.prompt]
    again(theirs, [Call(tuple(llm.tokenizer.encode(prompt)), 2)])  # warm
    rows = []
    for name in options.strategies:
        program = STRATEGIES[name].build(**RUNS[name])

        def run(program: Any = program) -> Any:
            return llm.run(program, [prompt], seed=SEED)[0]

        result, _, operations = recorded(llm, run)
        calls = [call for operation in operations for call in operation.calls]
        nodes = [call for call in calls if call.tokens]
        questions = list(dict.fromkeys(call for call in calls if not call.tokens))
        ways = {
            "treewise": run,
            "a_call_a_node": lambda nodes=nodes, questions=questions: again(theirs, [*nodes, *questions]),
            "siblings_together": lambda nodes=nodes, questions=questions: again(theirs, [*together(nodes), *questions]),
        }
        turns = [{way: seconds(call) for way, call in ways.items()} for _ in range(options.repeats)]
        median = {way: statistics.median(turn[way][0] for turn in turns) for way in ways}
        busy = {way: statistics.median(turn[way][1] for turn in turns) for way in ways}
        usage = result.tree.usage
        rows.append(
            {
                "strategy": name,
                "prompt": options.prompt,
                "settings": RUNS[name],
                "prompt_tokens": usage.prompt_tokens,
                "nodes": len(nodes),
                "places": len(together(nodes)),
                "questions": len(questions),
                "tokens": sum(call.tokens for call in nodes),
                "steps": usage.steps,
                "rows_a_step": round(usage.rows / usage.steps, 2),
                "seconds": {way: round(value, 3) for way, value in median.items()},
                "processor_seconds": {way: round(value, 3) for way, value in busy.items()},
                "turns": [{way: round(value, 3) for way, (value, _) in turn.items()} for turn in turns],
                "ratio": {way: round(value / median["treewise"], 2) for way, value in median.items()},
                "processor_ratio": {way: round(value / busy["treewise"], 2) for way, value in busy.items()},
                "shares": shares(run),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        machine = describe_machine(torch.device("cpu"))
        options.out.write_text(json.dumps({"bench": "search", "machine": machine, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

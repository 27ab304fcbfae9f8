"""Rollouts from many prompts, some at a time, in a file that the next run goes on from; on one engine or on replicas.

Run ``python examples/many_rollouts.py rollouts.jsonl``, end it with Ctrl-C, and run it again. The file has a line a
prompt, with the trajectories of its tree: tokens, log-probabilities, rewards, advantages. The same with prompts of your
own, on two replicas:

``treewise run examples/many_rollouts.py --prompts sums.txt --output rollouts.jsonl --ray local --data-parallel-size 2``
"""

import re
import sys

from treewise import LLM, Branch
from treewise.replicas import map_programs
from treewise.search import Trajectory, last_number, rollouts

SETTINGS = {"widths": (4, 2), "at": (4,), "max_tokens": 12, "stop": "\n"}
NUMBERS = range(2, 8)


async def program(root: Branch, temperature: float = 1.0) -> list[Trajectory]:
    """Draw a tree of samples; a text that ends with the sum of the last two numbers of the prompt earns 1."""
    numbers = re.findall(r"\d+", root.decode(root.tokens))
    total = sum(map(int, numbers[-2:]))

    def reward(texts: list[str]) -> list[float]:
        return [float(last_number(text) == str(total)) for text in texts]

    return await rollouts(root, reward=reward, temperature=temperature, **SETTINGS)


def main(path: str = "rollouts.jsonl") -> None:
    """Collect, and say what came of it."""
    prompts = [f"2 + 2 = 4\n10 + 4 = 14\n{a} + {b} =" for a in NUMBERS for b in NUMBERS]
    right = count = 0
    for result in map_programs(program, prompts, LLM("smollm2-135m"), output=path, in_flight=16, errors="keep"):
        if result.error is not None:
            print(f"prompt {result.index}: {result.error}", file=sys.stderr)
            continue
        rewards = [trajectory["reward"] for trajectory in result.value]
        right, count = right + sum(rewards), count + len(rewards)
    print(f"{path}: {count} trajectories of {len(prompts)} prompts, {right:.0f} of them right")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Collect rollouts for reinforcement learning: trees of samples with exact rewards, one trajectory a line of JSON.

Run ``python examples/collect_rollouts.py rollouts.jsonl``. The reward is a checker: 1 where the text states the right
sum. A model of 135 million parameters gets some of them, so that groups have both rewards and advantages say something;
where all of a prompt's trajectories earn the same, advantages are 0 and there is nothing to learn from it.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from treewise import LLM, Branch
from treewise.search import Trajectory, last_number, rollouts

SUMS = ((3, 5), (7, 6), (12, 9), (25, 17))
PROMPT = "Q: What is 2 + 2?\nA: 2 and 2 make 4.\n\nQ: What is 10 + 4?\nA: 10 and 4 make 14.\n\nQ: What is {} + {}?\nA:"
SETTINGS = {"widths": (4, 3), "at": (4,), "max_tokens": 16, "stop": "\n"}


async def collect(root: Branch, sums: dict[str, int]) -> list[Trajectory]:
    """Draw a tree for a sum; which one it is, the prompt says."""
    asked = root.decode(root.tokens)
    total = next(total for question, total in sums.items() if asked.endswith(question))

    def reward(texts: list[str]) -> list[float]:
        return [float(last_number(text) == str(total)) for text in texts]

    return await rollouts(root, reward=reward, **SETTINGS)


def main(path: str = "rollouts.jsonl") -> None:
    """Collect from all prompts in one batch, and say what came of it."""
    llm = LLM("smollm2-135m", device="cpu")
    sums = {PROMPT.format(a, b): a + b for a, b in SUMS}
    results = llm.run(collect, list(sums), sums=sums, seed=0)
    with Path(path).open("w", encoding="utf-8") as file:
        for result in results:
            result.tree.print()
            rewards = [trajectory.reward for trajectory in result.value]
            print(f"{sum(rewards):.0f} of {len(rewards)} are right\n")
            for trajectory in result.value:
                file.write(json.dumps(asdict(trajectory)) + "\n")
    decoded = sum(len(trajectory.token_ids) for result in results for trajectory in result.value)
    own = sum(len(trajectory.token_ids) - trajectory.shared for result in results for trajectory in result.value)
    print(f"{path}: {sum(len(result.value) for result in results)} trajectories, {own} tokens for {decoded}")


if __name__ == "__main__":
    main(*sys.argv[1:])

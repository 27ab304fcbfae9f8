"""The game of 24 by Tree of Thoughts: make 24 out of four numbers, each used once, in three steps.

The model proposes a step, such as ``8 * 3 =``; the program does the sum and writes down what is left; a checker says
whether 24 can still be reached, and the best lines of play go on. A model of 135 million parameters hardly ever wins
alone. Here it only has to name one good step among some, and the checker knows which that is. It still loses many
games, one of these two among them: where the good steps are none that it would think of.
"""

import re
from collections import Counter
from itertools import permutations

from treewise import LLM, Branch, SamplingParams, generate, keep

PROMPT = """\
Make 24 out of the numbers, two at a time.

Numbers: 4 4 6 8
4 + 8 = 12 (left: 4 6 12)
6 - 4 = 2 (left: 2 12)
2 * 12 = 24 (left: 24)

Numbers: 2 9 10 12
12 * 2 = 24 (left: 9 10 24)
10 - 9 = 1 (left: 1 24)
24 * 1 = 24 (left: 24)

Numbers: {}
"""
GAMES = ("2 4 5 8", "1 2 4 6")
STEP = SamplingParams(temperature=1.0, max_tokens=10, stop="=")


def combined(numbers: list[int], a: int, operation: str, b: int) -> list[int] | None:
    """What is left after a step; None where a number is not there or the result is not whole."""
    left = Counter(numbers)
    if Counter((a, b)) - left or (operation == "/" and (b == 0 or a % b)):
        return None
    result = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[operation]
    return [*sorted((left - Counter((a, b))).elements()), result] if result >= 0 else None


def step_of(numbers: list[int], text: str) -> list[int] | None:
    """What is left after the step that a text names; None where it is not allowed."""
    step = re.fullmatch(r"\s*(\d+) ([-+*/]) (\d+)\s*", text)
    return combined(numbers, int(step[1]), step[2], int(step[3])) if step else None


def worth(numbers: list[int] | None) -> float:
    """1 where 24 can be made of what is left, 0.1 where it cannot, 0 where the last step was not allowed."""
    if numbers is None:
        return 0.0
    if len(numbers) == 1:
        return 1.0 if numbers == [24] else 0.1
    steps = ((a, operation, b) for a, b in permutations(numbers, 2) for operation in "+-*/")
    return max(worth(combined(numbers, *step)) for step in steps)


async def play(root: Branch, numbers: list[int], width: int = 20, beam: int = 3) -> Branch:
    """Draw steps, write down what they leave, keep the best."""
    root.note = numbers
    frontier = [root]
    for _ in numbers[1:]:
        steps = [step for branch in frontier if branch.note for step in branch.fork(width)]
        await generate(steps, STEP)
        for step in steps:
            step.note = step_of(step.parent.note, step.new)
            if step.note:
                step.append(f" {step.note[-1]} (left: {' '.join(map(str, sorted(step.note)))})\n")
        # Of steps that leave the same numbers, one is enough.
        first = {tuple(sorted(step.note)): step for step in reversed(steps) if step.note}
        frontier = keep(steps, [worth(step.note) * (step in first.values()) for step in steps], beam) or frontier
    return frontier[0]


def main() -> None:
    """Play each game by search, then with one sample a step."""
    llm = LLM("smollm2-135m", device="cpu")
    for name, settings in (("search", {}), ("one sample a step", {"width": 1, "beam": 1})):
        won = 0
        for game in GAMES:
            numbers = [int(number) for number in game.split()]
            [result] = llm.run(play, [PROMPT.format(game)], numbers=numbers, seed=0, **settings)
            if name == "search":
                result.tree.print()
            won += result.value.note == [24]
            print(f"{game} by {name}: {result.best.text.strip()!r}")
        print(f"{name}: {won} of {len(GAMES)} games won\n")


if __name__ == "__main__":
    main()

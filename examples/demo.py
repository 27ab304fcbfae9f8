"""Solve one word problem with four search strategies and a small language model, on a CPU; draw each tree.

What `make demo` runs. The pages it writes need no network: open them in a browser.
"""

from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from treewise import LLM
from treewise.search import STRATEGIES, extract_answer, same_answer

QUESTION = "A pizza costs 9 dollars and a drink costs 3 dollars. What do they cost together? Answer in one sentence."
ANSWER = "12"
RUNS = {
    "best_of_n": {"n": 8, "max_tokens": 64, "temperature": 0.5},
    "self_consistency": {"n": 12, "max_tokens": 64, "temperature": 0.7},
    "beam": {"beam_width": 4, "max_tokens": 32},
    "tot": {"depth": 2, "width": 4, "beam": 2, "answer_tokens": 24, "evaluate": "logprob"},
}
FOLDER = Path(__file__).parents[1] / "demo"


def main() -> None:
    """Run the strategies one after the other; the prompt's keys and values are computed once."""
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    right = []
    with Progress(*columns, console=console) as progress:
        step = progress.add_task("Loading smollm2-135m (fetched once, then cached)", total=None)
        # "auto" would find that a CPU gains nothing by sharing so short a prompt; the point here is to show it.
        llm = LLM("smollm2-135m", device="cpu", attention="deft:flatten")
        progress.update(step, total=1, completed=1)
        console.print(f"[bold]{QUESTION}[/]")
        prompt = llm.tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])
        FOLDER.mkdir(exist_ok=True)
        for number, (name, settings) in enumerate(RUNS.items(), 1):
            strategy = STRATEGIES[name]
            step = progress.add_task(f"{number} of {len(RUNS)}: {name}", total=None)
            [result] = llm.run(strategy.build(**settings), [prompt], seed=0)
            progress.update(step, total=1, completed=1)

            answer = extract_answer(result.best.text) or "none"
            if same_answer(answer) == ANSWER:
                right.append(name)
            page = FOLDER / f"{name}.html"
            result.tree.to_html(page, title=f"{name}: {QUESTION}")
            console.rule(f"{name}: {strategy.description}", align="left")
            result.tree.print(console)
            console.print(f"Answer: [bold]{answer}[/] ({'right' if name in right else 'wrong'})")
            console.print(f"The whole tree: {page}\n", soft_wrap=True)
    console.print(f"{len(right)} of {len(RUNS)} strategies found {ANSWER}: {', '.join(right) or 'none'}")


if __name__ == "__main__":
    main()

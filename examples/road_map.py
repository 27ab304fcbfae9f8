"""A small puzzle by Monte Carlo tree search: find the way through a map of roads, some of which lead nowhere.

A thought is the next town. The reward checks a way against the map: it knows the goal when it is there, not how far off
it is. A model of 135 million parameters cannot read a map; it names towns, often enough such as can be reached, and the
search learns which of them lead on.
"""

from treewise import LLM
from treewise.search import monte_carlo_tree_search

ROADS = ("A-B", "A-C", "A-D", "B-E", "C-F", "D-G", "E-H", "F-K", "F-E", "G-C", "K-M")
START, GOAL, DEPTH = "A", "M", 5
PROMPT = """\
Roads: P-Q, P-R, Q-S, R-T, T-U
From P to U: P > R > T > U

Roads: V-W, V-X, W-Y, X-Z, Y-N
From V to N: V > W > Y > N

Roads: {}
From {start} to {goal}: {start} >"""
SETTINGS = {"iterations": 32, "parallel": 4, "depth": DEPTH, "width": 6, "c": 0.2, "temperature": 1.0, "top_p": 1.0}


def way_of(text: str) -> str:
    """The towns from the start on, up to the goal; empty where a road is missing or a town comes twice."""
    way = START
    for word in text.replace(">", " ").split()[:DEPTH]:
        if way[-1] == GOAL:
            break
        if word in way or not {f"{way[-1]}-{word}", f"{word}-{way[-1]}"} & set(ROADS):
            return ""
        way += word
    return way


def reward(texts: list[str]) -> list[float]:
    """1 at the goal, 0 for what is no way, else 0.2 a town."""
    ways = [way_of(text) for text in texts]
    return [1.0 if way.endswith(GOAL) else 0.2 * max(len(way) - 1, 0) for way in ways]


def main() -> None:
    """Search for the way, and show what the search has tried and where it came by most."""
    llm = LLM("smollm2-135m", device="cpu")
    prompt = PROMPT.format(", ".join(ROADS), start=START, goal=GOAL)
    settings = SETTINGS | {"evaluate": reward, "stop": " >", "thought_tokens": 3, "conclude": "", "answer_tokens": 1}
    [result] = llm.run(monte_carlo_tree_search, [prompt], seed=0, **settings)
    result.tree.print()
    way = way_of(result.best.text)
    print(" > ".join(way) or "no way", "(found)" if way.endswith(GOAL) else "(not found)")


if __name__ == "__main__":
    main()

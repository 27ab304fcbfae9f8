"""Ready-made programs over trees.

Best-of-n, self-consistency, beam search over tokens and over steps, Tree of Thoughts breadth first and depth first,
Monte Carlo tree search, rollouts for reinforcement learning, and template replay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from treewise.branch import Branch
from treewise.grammar import Grammar
from treewise.search.answers import EXTRACTORS, extract_answer, last_number, same_answer
from treewise.search.beams import beam_search, replay
from treewise.search.certainty import self_certainty
from treewise.search.conversation import ask
from treewise.search.evaluators import EVALUATORS
from treewise.search.monte_carlo import monte_carlo_tree_search
from treewise.search.samples import best_of_n, self_consistency
from treewise.search.steps import ALLOTMENTS, step_beam_search
from treewise.search.thinking import ThoughtParams
from treewise.search.thoughts import depth_first_thoughts, tree_of_thoughts
from treewise.search.trajectories import Trajectory, rollouts

__all__ = [
    "ALLOTMENTS",
    "EVALUATORS",
    "EXTRACTORS",
    "STRATEGIES",
    "Strategy",
    "ThoughtParams",
    "Trajectory",
    "ask",
    "beam_search",
    "best_of_n",
    "depth_first_thoughts",
    "extract_answer",
    "last_number",
    "monte_carlo_tree_search",
    "replay",
    "rollouts",
    "same_answer",
    "self_certainty",
    "self_consistency",
    "step_beam_search",
    "tree_of_thoughts",
]


Program = Callable[..., Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class Strategy:
    """A program that can be chosen by name.

    Attributes
    ----------
    name : str
    program : async function
        Takes the root `Branch` and keywords, all of which have defaults.
    width : str or None
        The keyword that says how many branches it draws side by side, if one number does.
    """

    name: str
    program: Program
    width: str | None = None

    @property
    def description(self) -> str:
        """What the strategy does, in one line."""
        return (inspect.getdoc(self.program) or "").partition("\n")[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """Its keywords with their defaults; those of `ThoughtParams` where it passes further keywords on."""
        parameters = inspect.signature(self.program).parameters.values()
        own = {item.name: item.default for item in parameters if item.default is not item.empty}
        passes_on = any(item.kind is item.VAR_KEYWORD for item in parameters)
        return own | ({item.name: item.default for item in fields(ThoughtParams)} if passes_on else {})

    @property
    def grammars(self) -> list[str]:
        """The keywords that take a grammar."""
        hints = get_type_hints(ThoughtParams) | get_type_hints(self.program)
        return [name for name in self.defaults if hints[name] == Grammar | None]

    def build(self, **settings: Any) -> Program:
        """Return the program with `settings` in place of its defaults.

        Raises
        ------
        ValueError
            If the strategy has no such keyword. Values are checked when the program starts.
        """
        defaults = self.defaults
        for name in settings:
            if name not in defaults:
                raise ValueError(f"{name}: strategy {self.name} has no such setting; it has {', '.join(defaults)}")

        async def program(root: Branch) -> Any:
            return await self.program(root, **settings)

        program.__name__ = self.name
        return program


STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("best_of_n", best_of_n, "n"),
        Strategy("self_consistency", self_consistency, "n"),
        Strategy("beam", beam_search, "beam_width"),
        Strategy("tot", tree_of_thoughts, "width"),
        Strategy("tot_dfs", depth_first_thoughts, "width"),
        Strategy("mcts", monte_carlo_tree_search, "width"),
        Strategy("step_beam", step_beam_search, "width"),
        Strategy("rollouts", rollouts),
        Strategy("replay", replay),
    )
}
"""The ready-made programs by name."""

"""Node generation for the tree searches of treequest (AB-MCTS and others): children go on from their parents' keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

from treewise.config import SamplingParams, check_integer
from treewise.llm import LLM, Prompt
from treewise.outputs import plain
from treewise.sampler import row_key
from treewise.search.evaluators import Reward


@dataclass(frozen=True)
class Thought:
    """The state of a node: all text from the prompt down to it. It can be copied, compared and pickled.

    Attributes
    ----------
    token_ids : tuple of int
        Tokens below the prompt.
    text : str
        Their text.
    new : str
        The node's own text, without the stop string that ended it.
    finished : bool
        Whether the model came to an end by itself.
    """

    token_ids: tuple[int, ...]
    text: str
    new: str
    finished: bool


class TreeQuestGenerator:
    """Generates and rates the nodes that an algorithm of treequest asks for, a batch at a time.

    A node's path is the prompt of its children. Its keys are in the prefix cache, so only what is new is computed, and
    attention reads what the nodes of a batch have in common once.

    Parameters
    ----------
    llm : LLM
        With prefix caching, as by default.
    prompt : str or list of int
        What the root stands for.
    reward : callable
        From the texts of all new nodes, each from below the prompt, to as many numbers. AB-MCTS wants them in [0, 1].
    actions : mapping of str to SamplingParams
        How children may be drawn, by the name that the algorithm chooses an action by.
    between : str
        Put between a node and its child, such as a request to improve on the answer; tokenised on its own.
    seed : int
        Of the node that is generated first; each further one has a seed of its own that follows from it.

    Raises
    ------
    ValueError
        If there are no actions, or one of them draws several continuations or has a seed.

    Examples
    --------
    >>> import treequest
    >>> def reward(texts):
    ...     return [min(len(text) / 100, 1.0) for text in texts]
    >>> generator = TreeQuestGenerator(llm, "Q: ...", reward, {"draw": SamplingParams(max_tokens=64)})
    >>> state = generator.search(treequest.ABMCTSA(), budget=8, batch_size=4)
    >>> [(thought, value)] = treequest.top_k(state, treequest.ABMCTSA(), k=1)
    """

    def __init__(
        self,
        llm: LLM,
        prompt: Prompt,
        reward: Reward,
        actions: Mapping[str, SamplingParams],
        between: str = "",
        seed: int = 0,
    ) -> None:
        if not actions:
            raise ValueError("actions: name at least one")
        for name, params in actions.items():
            if params.n != 1 or params.seed is not None:
                raise ValueError(f"actions: {name!r} must have n=1 and no seed; every node gets a seed of its own")
        self.llm = llm
        self.prompt = llm.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.reward = reward
        self.actions = dict(actions)
        self.between = llm.tokenizer.encode(between, add_special_tokens=False)
        self.seed = seed
        self.count = 0

    def generate(self, parents: Sequence[tuple[Thought | None, str]]) -> list[tuple[Thought, float]]:
        """Generate and rate a child of each parent in one batch.

        Parameters
        ----------
        parents : sequence of (Thought or None, action)
            None is the root. A parent may be named more than once.

        Raises
        ------
        ValueError
            If there is no such action, or the reward does not give one finite number a text.
        """
        before = [() if parent is None else (*parent.token_ids, *self.between) for parent, _ in parents]
        params = []
        for _, action in parents:
            if action not in self.actions:
                raise ValueError(f"action is {action!r}; choose one of {', '.join(self.actions)}")
            params.append(replace(self.actions[action], seed=row_key(self.seed, (self.count,))))
            self.count += 1
        outputs = self.llm.generate([[*self.prompt, *tokens] for tokens in before], params)
        thoughts = [self._thought(tokens, request.outputs[0]) for tokens, request in zip(before, outputs, strict=True)]
        values = [float(value) for value in self.reward([thought.text for thought in thoughts])]
        if len(values) != len(thoughts) or not all(map(isfinite, values)):
            raise ValueError(f"reward: it must give {len(thoughts)} finite numbers, not {values}")
        return list(zip(thoughts, values, strict=True))

    def search(self, algorithm: Any, budget: int, batch_size: int = 1, state: Any = None) -> Any:
        """Let `algorithm` ask for nodes and tell it of them.

        Parameters
        ----------
        algorithm : treequest.Algorithm
        budget : int
            Nodes to generate.
        batch_size : int
            Nodes that are asked for, and generated, at a time.
        state : optional
            Of an earlier search, to go on with.

        Returns
        -------
        The algorithm's state, for ``treequest.top_k``.
        """
        check_integer("budget", budget, 1)
        check_integer("batch_size", batch_size, 1)
        state = algorithm.init_tree() if state is None else state
        for start in range(0, budget, batch_size):
            state, trials = algorithm.ask_batch(state, min(batch_size, budget - start), list(self.actions))
            results = self.generate([(trial.parent_state, trial.action) for trial in trials])
            for trial, result in zip(trials, results, strict=True):
                state = algorithm.tell(state, trial.trial_id, result)
        return state

    @property
    def functions(self) -> dict[str, Callable[[Thought | None], tuple[Thought, float]]]:
        """For ``algorithm.step(state, generator.functions)``: a function an action, a node at a time."""
        return {name: partial(self._one, name) for name in self.actions}

    def _one(self, action: str, parent: Thought | None) -> tuple[Thought, float]:
        return self.generate([(parent, action)])[0]

    def _thought(self, before: Sequence[int], output: Any) -> Thought:
        tokens = list(output.token_ids)
        if tokens and tokens[-1] in self.llm.tokenizer.eos_token_ids:
            tokens.pop()  # its children go on where it ended
        text = plain(before, self.llm.tokenizer) + output.text
        return Thought((*before, *tokens), text, output.text, output.finish_reason == "stop")

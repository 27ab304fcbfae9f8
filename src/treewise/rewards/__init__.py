"""Reward models of Transformers as reward functions: one value a text, or one a step of it.

>>> from treewise.rewards import SequenceRewardModel
>>> rate = SequenceRewardModel("org/reward-model").about("What is 2 + 3?")     # doctest: +SKIP
>>> llm.run(best_of_n, "What is 2 + 3?", by=rate)                              # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from statistics import fmean
from typing import Any

from treewise.rewards.classifier import Classifier, Message
from treewise.search.evaluators import Reward

__all__ = ["AGGREGATES", "SequenceRewardModel", "TokenRewardModel"]

Question = str | Sequence[Message]
"""What texts answer: a text that stands right before them, or a conversation whose next turn they are."""

AGGREGATES: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "last": lambda values: values[-1],
    "mean": fmean,
    "product": prod,
}
"""What a text is worth, given the values of its steps, by name."""


class SequenceRewardModel:
    """A reward model that gives a text one value: a Transformers model for sequence classification.

    It is a reward function, for ``best_of_n(by=...)``, ``step_beam_search(evaluate=...)`` and the like, which call it
    in a worker thread.

    Parameters
    ----------
    model, tokenizer, label, batch_size, device
        See `Classifier`. With one label the value is the model's score, else the probability of `label`.

    Raises
    ------
    ValueError
        If there is no tokenizer or no such label.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        label: int | str | None = None,
        batch_size: int = 8,
        device: str = "auto",
    ) -> None:
        self.classifier = Classifier("AutoModelForSequenceClassification", model, tokenizer, label, batch_size, device)

    def __call__(self, texts: Sequence[str], question: Question = "") -> list[float]:
        """Rate texts as answers to `question`.

        Raises
        ------
        ValueError
            If an input is empty or too long for the model, or messages are given and there is no chat template.
        """
        if isinstance(question, str):
            inputs = [self.classifier.encode(question + text) for text in texts]
        else:
            answers = [{"role": "assistant", "content": text} for text in texts]
            inputs = [self.classifier.converse([*question, answer], begun=False) for answer in answers]
        return [float(value) for value in self.classifier.values(inputs)]

    def about(self, question: Question) -> Reward:
        """Return a reward function for answers to one question; programs give it their texts below the prompt."""
        return partial(self, question=question)


class TokenRewardModel:
    """A process reward model, which gives each step of a text a value: a Transformers model for token classification.

    A step's value is that of the last token of its `marker`. It is a reward function, see `SequenceRewardModel`.

    Parameters
    ----------
    model, tokenizer, label, batch_size, device
        See `Classifier`. With one label the value is the model's score, else the probability of `label`.
    separator : str
        What steps end with in the texts; a last step may lack it. Blank steps do not count.
    marker : str, optional
        What the model was trained to find behind each step; default the separator. It is tokenised on its own.
    aggregate : str
        A name from `AGGREGATES`: what a text is worth, given its steps.

    Raises
    ------
    ValueError
        If there is no tokenizer, label or aggregate of this name, or the marker has no tokens.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        label: int | str | None = None,
        separator: str = "\n",
        marker: str | None = None,
        aggregate: str = "min",
        batch_size: int = 8,
        device: str = "auto",
    ) -> None:
        if aggregate not in AGGREGATES:
            raise ValueError(f"aggregate is {aggregate!r}; choose one of {', '.join(AGGREGATES)}")
        self.classifier = Classifier("AutoModelForTokenClassification", model, tokenizer, label, batch_size, device)
        self.separator = separator
        self.marker = self.classifier.encode(separator if marker is None else marker, begins=False)
        if not separator or not self.marker:
            raise ValueError(f"separator and marker must not be empty; they are {separator!r} and {marker!r}")
        self.aggregate = AGGREGATES[aggregate]

    def __call__(self, texts: Sequence[str], question: Question = "") -> list[float]:
        """Rate texts as answers to `question`, by the aggregate of their steps."""
        return [self.aggregate(values) for values in self.steps(texts, question)]

    def about(self, question: Question) -> Reward:
        """Return a reward function for answers to one question; programs give it their texts below the prompt."""
        return partial(self, question=question)

    def steps(self, texts: Sequence[str], question: Question = "") -> list[list[float]]:
        """Return the values of each text's steps; a text without any is one step.

        Raises
        ------
        ValueError
            If an input is too long for the model, or messages are given and there is no chat template.
        """
        encode = self.classifier.encode
        before = encode(question) if isinstance(question, str) else self.classifier.converse(question, begun=True)
        inputs, ends = [], []
        for text in texts:
            ids, last = list(before), []
            for step in [step for step in text.split(self.separator) if step.strip()] or [text]:
                ids += encode(step, begins=False) + self.marker
                last.append(len(ids) - 1)
            inputs.append(ids)
            ends.append(last)
        rated = self.classifier.values(inputs)
        return [values[last].tolist() for values, last in zip(rated, ends, strict=True)]

"""Which heads of a model need their tokens: weights for budgets by head, found by gradient on made-up texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.config import ModelConfig, check_integer
from treewise.evaluate.cache import Held
from treewise.evaluate.measures import kl_divergence
from treewise.evaluate.study import check_names
from treewise.evaluate.tasks import SANITY, TASKS, Encoded, make
from treewise.evaluate.trial import Contender, predict, ways_to_ask
from treewise.models import CausalLM, Tokenizer
from treewise.ops import Heads, rotate
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.select import ranked

CALIBRATION = 2_000_000
"""Seeds from here on make the texts: neither those of a `Study` nor those that choose its tasks."""

SOFTNESS = 0.2
"""How soft the edge of a head's budget is: of tokens a factor ``1 + SOFTNESS`` further down, about 27 % still count."""

RATE, WARM_UP = 0.1, 10
"""The highest rate of learning, and the steps in which it rises to that; it falls to nothing in the end."""


class Lesson(NamedTuple):
    """A text as the dense model has read it, and how it goes on.

    Attributes
    ----------
    length : int
        Tokens of the prompt.
    held : list of Held
        Keys and values of each layer.
    ranks : list of (Tensor [kv_heads, tokens], float32) or None
        The place of each token among those of its head, from the best one, 1, on; None for a layer with a window of its
        own.
    continuation : list of int
        What the dense cache says.
    dense : Tensor [places, vocabulary], float32
        The log-probs of each token of it but the first.
    """

    length: int
    held: list[Held]
    ranks: list[Tensor | None]
    continuation: list[int]
    dense: Tensor


def read_lesson(model: CausalLM, encoded: Encoded, policy: KVSparsity, new_tokens: int) -> Lesson:
    """Read a text with its question behind it, and rank the tokens of each head as a policy does."""
    way = ways_to_ask(model, encoded, ["aware"], new_tokens)["aware"]
    start = way.start
    ranks: list[Tensor | None] = []
    for layer, window in enumerate(model.config.layer_windows):
        if window is not None:
            ranks.append(None)
            continue
        order = ranked(policy.scores(start.evidence(layer, policy.num_queries), start.length))
        ranks.append(order.argsort(-1).float() + 1)
    _, [dense], _ = predict([start], [], way.continuation)
    # NOTE: what is made in inference mode cannot be differentiated through; a copy can.
    held = [Held(*(part.clone() for part in layer)) for layer in start.held]
    return Lesson(start.length, held, ranks, way.continuation, dense.clone())


def soft_divergence(model: CausalLM, lesson: Lesson, budgets: Tensor) -> Tensor:
    """Return KL(dense || sparse) of a lesson at each place [places], by budgets that can be differentiated.

    A token of rank ``r`` counts in attention as ``sigmoid(log(budget / r) / SOFTNESS)`` tokens.

    Parameters
    ----------
    model : CausalLM
        In float32 and not packed.
    lesson : Lesson
    budgets : Tensor [layers, kv_heads], float32
        Of the layers without a window of their own.
    """
    config = model.config
    tokens = torch.tensor(lesson.continuation[:-1])
    positions = torch.arange(lesson.length, lesson.length + len(tokens))
    rows = iter(budgets)
    weights = [
        None if ranks is None else F.logsigmoid((next(rows)[:, None].log() - ranks.log()) / SOFTNESS)
        for ranks in lesson.ranks
    ]

    def attend(layer: int, heads: Heads) -> Tensor:
        q, k, v = rotate(heads, config.num_kv_heads)
        new = Held(k.transpose(0, 1), v.transpose(0, 1), positions.expand(config.num_kv_heads, -1))
        return attend_softly(config, layer, q, positions, lesson.held[layer].and_also(new), weights[layer])

    log_probs = model.logits(model(tokens, positions, attend)).float().log_softmax(-1)
    return kl_divergence(lesson.dense, log_probs)


def attend_softly(
    config: ModelConfig, layer: int, queries: Tensor, positions: Tensor, held: Held, weights: Tensor | None
) -> Tensor:
    """Let queries [rows, heads, head_dim] see what a layer holds, its first tokens by their log-weights.

    Nothing is done in place, so that gradients come through; see `treewise.evaluate.cache.attend`.
    """
    grouped = queries.unflatten(1, (len(held.keys), -1)).permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
    scores = (grouped * config.attention_scale) @ held.keys[:, None].mT
    if (cap := config.attention_soft_cap) is not None:
        scores = (scores / cap).tanh() * cap
    if weights is not None:
        scores = scores + F.pad(weights, (0, scores.shape[-1] - weights.shape[1]))[:, None, None]
    distance = positions[:, None] - held.positions[:, None]  # [kv_heads, rows, tokens]
    window = config.layer_windows[layer]
    unseen = distance < 0 if window is None else (distance < 0) | (distance >= window)
    outputs: Tensor = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1) @ held.values[:, None]
    return outputs.permute(2, 0, 1, 3).flatten(1, 2)


def learn(
    model: CausalLM,
    lessons: Sequence[Lesson],
    policy: KVSparsity,
    steps: int,
    done: Callable[[float], None] = lambda divergence: None,
) -> Tensor:
    """Find the weights of heads with which a policy diverges least from dense caches, float32 [layers, kv_heads].

    Budgets are those of `treewise.sparsity.Calibrated`, their sum being that of the policy's budget at each step. What
    is made less is ``1 - exp(-KL)``, so that an answer that is lost anyway does not outweigh all others. The gradient
    comes from one lesson a step.

    Parameters
    ----------
    model, lessons, policy
    steps : int
    done : callable
        Called after each step with the divergence at this one.
    """
    shape = (model.config.layer_windows.count(None), model.config.num_kv_heads)
    logits = torch.zeros(shape, requires_grad=True)
    adam = torch.optim.Adam([logits], betas=(0.9, 0.95))
    draw = random.Random(0)
    order: list[Lesson] = []
    for step in range(steps):
        order = order or draw.sample(lessons, len(lessons))
        lesson = order.pop()
        least = policy.least(lesson.length)
        mean_budget = mean(policy.budgets(lesson.length, shape[0]))
        shares = logits.flatten().softmax(0).view(shape) * logits.numel()
        divergence = soft_divergence(model, lesson, least + shares * (mean_budget - least))
        [logits.grad] = torch.autograd.grad((1 - (-divergence).exp()).mean(), [logits])
        adam.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / steps)
        adam.step()
        done(float(divergence.detach().mean()))
    return logits.detach().flatten().softmax(0).view(shape) * logits.numel()


@dataclass(frozen=True)
class Calibration:
    """What heads are calibrated on.

    Attributes
    ----------
    policy : str
        Whose scores say which tokens a head keeps first; see `treewise.evaluate.trial.Contender`.
    budget : int or float
        See `KVSparsity.budget`.
    tasks : tuple of str
        Among `TASKS`.
    tokens, new_tokens : int
        Lengths of the texts and of the dense cache's continuations.
    seeds : int
        Texts of each task.
    steps : int
        Steps of gradient descent, one text each.

    Raises
    ------
    ValueError
        A name is unknown or a number out of range.
    """

    policy: str = "induction"
    budget: int | float = 0.25
    tasks: tuple[str, ...] = tuple(name for name in TASKS if name != SANITY)
    tokens: int = 640
    new_tokens: int = 24
    seeds: int = 4
    steps: int = 240

    def __post_init__(self) -> None:
        check_names("tasks", self.tasks, TASKS)
        check_integer("tokens", self.tokens, 128)
        check_integer("new_tokens", self.new_tokens, 2)
        check_integer("seeds", self.seeds, 1)
        check_integer("steps", self.steps, 1)
        Contender(self.policy, self.budget).policy()

    def run(self, model: CausalLM, tokenizer: Tokenizer, done: Callable[[str], None]) -> dict[str, Any]:
        """Read the texts and find the weights.

        `done` is called after each text and each step, with what it was.

        Returns
        -------
        dict
            ``weights``, of each layer and KV head, 1 in the mean; ``divergence``, the mean KL (nats a token) in each
            twentieth of the steps, with budgets whose edges are soft.

        Raises
        ------
        ValueError
            If texts are longer than the model's context, or the model cannot have the policy.
        """
        check_integer("tokens", self.tokens, 128, model.config.max_positions - 128)
        policy = Contender(self.policy, self.budget).policy()
        if reasons := policy.refusals(model.config):
            raise ValueError(f"policy: {'; '.join(reasons)}")
        lessons = list(self._read(model, tokenizer, policy, done))
        divergence: list[float] = []

        def step(found: float) -> None:
            divergence.append(found)
            done("learning")

        weights = learn(model, lessons, policy, self.steps, step)
        part = -(-self.steps // 20)
        return {
            "weights": weights.tolist(),
            "divergence": [mean(divergence[start : start + part]) for start in range(0, self.steps, part)],
        }

    def _read(
        self, model: CausalLM, tokenizer: Tokenizer, policy: KVSparsity, done: Callable[[str], None]
    ) -> Iterator[Lesson]:
        for seed in range(CALIBRATION, CALIBRATION + self.seeds):
            for task in self.tasks:
                encoded = make(TASKS[task], seed, self.tokens, tokenizer)
                yield read_lesson(model, encoded, policy, self.new_tokens)
                done(task)

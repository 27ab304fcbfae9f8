"""A made-up language model and the step loop around controllers, without keys, plans or an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from treewise.controller import Controller, Leaf, TreeView
from treewise.sampler import log_probs, row_key
from treewise.text import Detokenizer

Model = Callable[[Sequence[int]], Tensor]  # all tokens so far -> logits [vocab]


def random_model(vocab_size: int, order: int = 3, scale: float = 2.0) -> Model:
    """Logits that depend on the last `order` tokens only, and on how many tokens there are."""

    def logits(tokens: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(row_key(len(tokens), tokens[-order:]) >> 1)
        return torch.randn(vocab_size, generator=generator) * scale

    return logits


class Letters:
    """A tokenizer whose token ``i`` is the ``i``-th of `pieces`."""

    def __init__(self, pieces: Sequence[str | bytes]) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", "replace")


def grow(
    model: Model,
    controller: Controller,
    prompt: Sequence[int],
    *,
    eos: Sequence[int] = (),
    num_roots: int = 1,
    seed: int = 0,
    tokenizer: Letters | None = None,
    max_steps: int = 1000,
) -> tuple[list[Leaf], list[Leaf]]:
    """Run one operation to its end: its finished and its live leaves."""
    stopping = controller.stopping
    leaves = [
        Leaf(
            prompt_tokens=list(prompt),
            path=(i,),
            key=row_key(seed, (i,)),
            room=stopping.max_tokens,
            detokenizer=None if tokenizer is None else Detokenizer(tokenizer, stopping.stop),
        )
        for i in range(num_roots)
    ]
    finished: list[Leaf] = []
    end_token_ids = stopping.end_token_ids(eos)
    for depth in range(max_steps):
        logits = torch.stack([model([*leaf.prompt_tokens, *leaf.tokens]) for leaf in leaves])
        logprobs = log_probs(logits)
        rows = controller.step(TreeView(leaves, logits, depth, finished, frozenset(eos)), logprobs)
        if rows is None:
            break
        pairs = list(zip(*(each.tolist() for each in rows.arrays(len(leaves), logits.shape[1])), strict=True))
        parents = [parent for parent, _ in pairs]
        next_leaves, num_children = [], [0] * len(leaves)
        for parent, token in pairs:
            leaf = leaves[parent]
            path = leaf.path
            if parents.count(parent) > 1:
                path = (*path, num_children[parent])
                num_children[parent] += 1
            child = replace(
                leaf,
                logprob=leaf.logprob + float(logprobs[parent, token]),
                tokens=[*leaf.tokens, token],
                path=path,
                key=row_key(seed, path),
                num_tokens=leaf.num_tokens + 1,
                room=None if leaf.room is None else leaf.room - 1,
            )
            stopped = False
            if leaf.detokenizer is not None:
                child.detokenizer = leaf.detokenizer.fork()
                child.detokenizer.push(token)
                stopped = child.detokenizer.stopped is not None
            ended = token in end_token_ids or child.room == 0 or stopped
            (finished if ended else next_leaves).append(child)
        leaves = next_leaves
        if not leaves:
            break
    return finished, leaves

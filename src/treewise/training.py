"""Trains Medusa heads for a model, on texts as the model reads them and on what it says by itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, repeat
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.awaitables import generate
from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.llm import LLM
from treewise.models import CausalLM, Tokenizer
from treewise.speculate.features import Features
from treewise.speculate.medusa import MedusaHeads, output_rows

PIECE = 256
"""Tokens of a piece of text that is read."""
TALK = 320
"""Tokens of a talk of the model with itself."""
ABREAST = 48
"""Talks that go on side by side."""
VOCABULARY = 8192
"""Tokens that heads choose from: fewer make heads cheap, and the rare ones are hardly ever guessed anyway."""
SEGMENT, SEGMENTS = 64, 16
"""Tokens in a row, and such rows, that a step of training takes."""
LIKELY = 4
"""Tokens of the model's choice that a head learns: the likeliest, with their probabilities."""
WARM_UP = 20
"""Steps in which the rate of learning rises to the highest."""
DROPPED = 0.2
"""Share of the numbers of a state that a head does not see in a step of training; else it learns texts by heart."""
RATE = 2e-3
"""The highest rate of learning; it falls to nothing in the end."""


class Lesson(NamedTuple):
    """A text as the model has read it.

    Attributes
    ----------
    tokens : list of int
    states : Tensor [known, hidden size]
        The last hidden states of its first tokens; those of the last one are not known.
    """

    tokens: list[int]
    states: Tensor


def read(
    llm: LLM, prompts: Iterable[Sequence[int]], params: SamplingParams, seconds: float, abreast: int = ABREAST
) -> Iterator[Lesson]:
    """Let a model go on from prompts, and yield what it has read and said, until there are no more or time is over.

    Parameters
    ----------
    llm : LLM
        Whose engine has nothing else to do.
    prompts : iterable of lists of int
    params : SamplingParams
    seconds : float
    abreast : int
        Prompts that are worked on side by side.
    """
    engine = llm.engine
    features = Features(engine.runner)
    done: list[Lesson] = []

    def take(root: Branch) -> None:
        slots = []
        for node in engine.kv.forest.path(root.end()):
            slots.append(engine.kv.slots(node)[: node.computed])
            if node.computed < len(node.tokens):
                break
        done.append(Lesson(root.path_tokens, features.states[features.place(np.concatenate(slots))]))

    async def program(root: Branch) -> None:
        await generate([root], params)
        take(root)

    end, left = perf_counter() + seconds, iter(prompts)
    try:
        while perf_counter() < end:
            while len(engine.requests) < abreast and (prompt := next(left, None)) is not None:
                engine.add(program, prompt)
            if not engine.requests:
                break
            engine.step()
            yield from done
            done.clear()
        for request in engine.requests.values():
            take(request.tree.root)
        yield from done
    finally:
        for request in [*engine.requests.values()]:
            engine.abort(request)
        features.end()


def pieces(tokenizer: Tokenizer, texts: Sequence[str], seed: int) -> list[list[int]]:
    """Cut texts into pieces of `PIECE` tokens, in an order drawn at random."""
    tokens = [tokenizer.encode(text) for text in texts]
    cut = [own[start : start + PIECE] for own in tokens for start in range(0, len(own), PIECE)]
    random.Random(seed).shuffle(cut)
    return cut


def opening(tokenizer: Tokenizer) -> list[int]:
    """Return what stands before the first words of a user, so that a model makes up a talk by itself.

    Notes
    -----
    As Magpie does (Xu et al., 2024): a model that was taught to answer has seen what users ask.
    """
    mark = "\x01"
    if tokenizer.has_chat_template:
        before = tokenizer.render_chat([{"role": "user", "content": mark}]).partition(mark)[0]
        return tokenizer.encode(before, add_special_tokens=False, parse_special=True)
    return tokenizer.encode("\n")


def lessons(llm: LLM, texts: Sequence[str], seconds: float, seed: int = 0) -> list[Lesson]:
    """Let a model read texts for half of the time at most, and talk with itself for the rest."""
    start = perf_counter()
    reading = SamplingParams(max_tokens=1)
    taught = list(read(llm, pieces(llm.tokenizer, texts, seed), reading, seconds / 2, abreast=4))
    talking = SamplingParams(temperature=0.7, max_tokens=TALK, ignore_eos=True)
    left = seconds - (perf_counter() - start)
    return taught + list(read(llm, repeat(opening(llm.tokenizer)), talking, left))


def frequent(taught: Sequence[Lesson], vocab_size: int) -> Tensor:
    """Return the most frequent tokens of lessons, then the first ones that a tokenizer has made: int64 [tokens]."""
    counts = Counter(token for lesson in taught for token in lesson.tokens)
    ranked = dict.fromkeys([token for token, _ in counts.most_common(VOCABULARY)] + list(range(vocab_size)))
    return torch.tensor(sorted(list(ranked)[:VOCABULARY]))


def train(
    model: CausalLM,
    taught: Sequence[Lesson],
    num_heads: int,
    num_layers: int,
    seconds: float,
    say: Callable[[float, float, Sequence[float]], None] = lambda over, loss, right: None,
) -> MedusaHeads:
    """Train heads that share the model's output matrix to say at once what the model says some tokens later.

    A head learns the likeliest tokens there, not only the one that came: the model's states are known, and so is what
    it makes of them. It learns to tell them from all that are likely somewhere in the step of training, which takes a
    small part of the output matrix.

    Parameters
    ----------
    model : CausalLM
        Stays as it is.
    taught : sequence of Lesson
    num_heads, num_layers : int
    seconds : float
        More of it than a few looks at each token makes heads worse at other texts.
    say : callable, optional
        Told after each step how much of the time is over, from 0 to 1, the loss, and how often each head was right.
    """
    start = perf_counter()
    vocabulary = frequent(taught, model.config.vocab_size).to(model.device)
    heads = MedusaHeads.untrained(model, num_heads, num_layers, vocabulary)
    output = output_rows(model, vocabulary).float()
    states = torch.cat([lesson.states for lesson in taught])
    odds, tokens = _likely(states, output)
    # Head k learns, from the state of token i, what the state of token i + 1 + k of the same lesson says.
    lengths = np.array([len(lesson.states) for lesson in taught])
    places = np.arange(len(states))
    usable = torch.from_numpy(places + num_heads < np.repeat(np.cumsum(lengths), lengths)).to(model.device)
    begins = usable.nonzero()[:, 0]
    offsets = torch.arange(1, num_heads + 1, device=model.device)[:, None]
    optimizer = torch.optim.AdamW(heads.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    for step in count():
        over = (perf_counter() - start) / seconds
        if over >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - over)
        first = begins[torch.randint(len(begins), (SEGMENTS, 1), device=model.device)]
        rows = ((first + torch.arange(SEGMENT, device=model.device)) % len(states)).flatten()
        rows = rows[usable[rows]]
        ahead = (rows + offsets).flatten()  # head by head
        choice, places_of = tokens[ahead].unique(return_inverse=True)
        x = heads.blocks(F.dropout(states[rows].float(), DROPPED))
        logits = F.linear(x.flatten(0, 1), output[choice])
        wanted = odds[ahead]
        loss = -(wanted * logits.log_softmax(-1).gather(1, places_of)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (logits.argmax(-1) == places_of[:, 0]).float().unflatten(0, (num_heads, -1)).mean(1)
        say(over, loss.item(), right.tolist())
    return heads.requires_grad_(False)


@torch.no_grad()
def _likely(states: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of the likeliest tokens behind each state, the likeliest first, and which they are."""
    parts = [F.linear(part.float(), output).topk(LIKELY, dim=-1) for part in states.split(SEGMENT * SEGMENTS)]
    return torch.cat([part.values.softmax(-1) for part in parts]), torch.cat([part.indices for part in parts])

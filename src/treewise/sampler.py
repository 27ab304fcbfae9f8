"""Penalties, temperature, top-k/p/min-p, log-probs: logits to tokens, each row as if it were alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treewise.config import SamplingParams
from treewise.constraint import Constraint, grammar_bias

Candidates = dict[int, tuple[float, int]]
"""Log-probability and rank (1 is the likeliest) of some tokens of one position."""

_MASK64 = (1 << 64) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
CHUNK = 128
"""Columns of a row that `Distributions` look at together."""
UNLIKELY = -1e4
"""Logit of tokens that a network cannot choose: far below all others, and yet above those that a grammar refuses."""
_CACHED_LOGITS = 1 << 18  # 1 MiB of float32


class SamplingRow(NamedTuple):
    """One row of logits: how to sample from it, and from which random stream.

    Attributes
    ----------
    params : SamplingParams
        Decides everything but the fields below.
    key : int
        64-bit key of the branch's random stream, see `row_key`.
    position : int
        Logical position of the token to sample: with `key` it selects the random numbers.
    num_tokens : int
        Tokens decoded so far, for ``min_tokens``.
    prompt_tokens, output_tokens : sequence of int
        What the penalties look at.
    constraint : Constraint or None
        How far a text under ``params.grammar`` has come.
    """

    params: SamplingParams
    key: int
    position: int
    num_tokens: int = 0
    prompt_tokens: Sequence[int] = ()
    output_tokens: Sequence[int] = ()
    constraint: Constraint | None = None


def _mix64(x: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _mix64s(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix64` of many numbers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def row_key(seed: int, path: Iterable[int]) -> int:
    """Key of the random stream of a branch.

    Parameters
    ----------
    seed : int
        Seeds that agree modulo 2**64 are the same.
    path : iterable of int
        The branch's place in its tree: child ordinals from the root.

    Returns
    -------
    int
        64 bits; a branch, its children and its siblings all have different ones.

    Examples
    --------
    >>> row_key(42, (0, 1)) == row_key(42, [0, 1])
    True
    >>> len({row_key(seed, path) for seed in (0, 1) for path in [(), (0,), (1,), (0, 0), (0, 1)]})
    10
    """
    key = _mix64(int(seed) + _GOLDEN64)
    for ordinal in path:
        key = child_key(key, ordinal)
    return key


def child_key(key: int, ordinal: int) -> int:
    """Key of the `ordinal`-th child of the branch that has `key`; see `row_key`."""
    return _mix64(key * 3 + _mix64(ordinal + _GOLDEN64))


def _scramble32(x: Tensor) -> Tensor:
    """Mix the bits of int32 `x` in place: a bijection, "lowbias32" of Chris Wellons' hash prospector."""
    shifted = torch.empty_like(x)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        torch.bitwise_right_shift(x, shift, out=shifted)
        shifted &= (1 << (32 - shift)) - 1  # int32 shifts in copies of the sign
        x ^= shifted
        if factor != 1:
            x *= factor
    return x


@lru_cache(maxsize=8)
def _token_words(vocab_size: int, device: torch.device) -> Tensor:
    return _scramble32(torch.arange(vocab_size, dtype=torch.int32, device=device))  # [vocab]


def random_words(rows: Sequence[SamplingRow]) -> NDArray[np.int32]:
    """Random words of each row's token to come, [rows, 2].

    NOTE: two rows with one (key, position) get the same: a key must belong to one branch.
    """
    keys = np.fromiter((row.key for row in rows), np.uint64, len(rows))
    positions = np.fromiter((row.position for row in rows), np.uint64, len(rows))
    words = _mix64s(keys * np.uint64(5) + _mix64s(positions + np.uint64(_GOLDEN64)))
    return words.view(np.int32).reshape(-1, 2)


def _gumbel(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> Tensor:
    """Gumbel noise [rows, vocab] that depends on (key, position, token id) and nothing else."""
    return _noise(torch.from_numpy(random_words(rows)).to(device), _token_words(vocab_size, device))


def _noise(words: Tensor, token_words: Tensor) -> Tensor:
    """Gumbel noise from the random words of rows [rows, 2] and those of tokens, [tokens] or [rows, tokens]."""
    bits = token_words * (words[:, :1] | 1)
    bits += words[:, 1:]
    # The fine end of the floats near 0, where winning tokens lie, as the negative of a number above 0 and below 1: the
    # clamp keeps what follows finite, so that a token of probability 1 always wins.
    uniform = _scramble32(bits).bitwise_and_(0x7FFFFFFF).to(torch.float32)
    uniform = uniform.add_(0.5).mul_(-(2.0**-31)).clamp_(min=2.0**-24 - 1)
    return uniform.log1p_().neg_().log_().neg_()  # of an exponential variate


def log_probs(logits: Tensor) -> Tensor:
    """Natural log-probabilities [rows, vocab] in float32 of raw `logits` [rows, vocab]."""
    return torch.log_softmax(logits.float(), dim=-1)


def top_log_probs(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` highest log-probs a row, best first, and their token ids: both [rows, count]."""
    values, tokens = logprobs.topk(min(count, logprobs.shape[-1]), dim=-1)
    return values, tokens


def ranked(logprobs: Tensor, tokens: Sequence[int], count: int) -> list[Candidates]:
    """Return the `count` likeliest tokens of each row and the one that is given: log-probability and rank.

    Parameters
    ----------
    logprobs : Tensor [rows, vocab] float32
    tokens : sequence of int, [rows]
    count : int
        0: only the given ones.
    """
    own = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)[:, None])
    ranks = (logprobs > own).sum(dim=-1) + 1
    given = torch.stack((own[:, 0].double(), ranks.double()), dim=1).tolist()
    result = [{token: (value, int(rank))} for token, (value, rank) in zip(tokens, given, strict=True)]
    if count:
        values, others = (part.tolist() for part in top_log_probs(logprobs, count))
        for candidates, best, best_tokens in zip(result, values, others, strict=True):
            for rank, (value, token) in enumerate(zip(best, best_tokens, strict=True), 1):
                candidates.setdefault(token, (value, rank))
    return result


def invalid_rows(logits: Tensor) -> Tensor:
    """Tell the rows [rows] (bool) that nothing can be sampled from: a NaN, a +inf, or no finite logit at all."""
    return ~logits.amax(dim=-1).isfinite()


def _edit_logits(logits: Tensor, row: SamplingRow, eos_token_ids: Collection[int]) -> None:
    """Apply bias, ``min_tokens`` and penalties of one row to its `logits` [vocab], in place."""
    params, device = row.params, logits.device
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), device=device)
        logits[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=logits.dtype, device=device)
    if _bans_ends(row):
        logits[torch.tensor(sorted(params.end_token_ids(eos_token_ids)), dtype=torch.int64, device=device)] = -math.inf
    if params.repetition_penalty != 1.0:
        tokens = torch.tensor(sorted({*row.prompt_tokens, *row.output_tokens}), dtype=torch.int64, device=device)
        seen = logits[tokens]
        logits[tokens] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(row.output_tokens)
        tokens = torch.tensor(list(counts), dtype=torch.int64, device=device)
        penalties = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        logits[tokens] -= torch.tensor(penalties, dtype=logits.dtype, device=device)


def edited_logits(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int]) -> Tensor:
    """Return the logits after what comes before temperature, in float32: themselves, if no row asks for any of it."""
    constrained = [i for i, row in enumerate(rows) if row.constraint is not None]
    edited = [i for i, row in enumerate(rows) if _is_edited(row)]
    if not constrained and not edited:
        return logits
    logits = logits.to(torch.float32, copy=True)
    if constrained:
        bias = grammar_biases([rows[i] for i in constrained], eos_token_ids, logits.device)
        logits.index_add_(0, torch.tensor(constrained, device=logits.device), bias)
    for i in edited:
        _edit_logits(logits[i], rows[i], eos_token_ids)
    return logits


def _is_edited(row: SamplingRow) -> bool:
    params = row.params
    return bool(params.logit_bias or _bans_ends(row) or params.has_penalties)


def _bans_ends(row: SamplingRow) -> bool:
    return row.num_tokens < row.params.min_tokens and row.constraint is None  # else see `grammar_biases`


def grammar_biases(rows: Sequence[SamplingRow], eos_token_ids: Collection[int], device: torch.device) -> Tensor:
    """Return what to add to the logits [rows, vocab] of rows that all have a constraint.

    ``min_tokens`` and ``ignore_eos`` count as long as the grammar lets something else than an end come.
    """
    unwanted = []
    for row in rows:
        young = row.num_tokens < row.params.min_tokens
        ends = eos_token_ids if young or row.params.ignore_eos else ()
        unwanted.append({*ends, *(row.params.stop_token_ids if young else ())})
    return grammar_bias([cast(Constraint, row.constraint) for row in rows], unwanted, device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]  # [rows, 1]


def _is_cut(params: SamplingParams) -> bool:
    return params.min_p > 0 or params.top_k > 0 or params.top_p < 1


def _lowest(best: Tensor, total: Tensor, params: Sequence[SamplingParams], whole: bool) -> tuple[Tensor, Tensor]:
    """Find the lowest logit [rows, 1] that min-p, then top-k, then top-p over what the two left keep of each row.

    Equal logits are kept or cut together, so what a row keeps depends neither on the order of a sort nor on the rest
    of the batch.

    Parameters
    ----------
    best : Tensor [rows, count]
        A row's highest logits, in order; the first is 0.
    total : Tensor [rows, 1]
        Log-sum-exp of all its logits.
    params : sequence of SamplingParams
    whole : bool
        Whether these are all its logits.

    Returns
    -------
    lowest : Tensor [rows, 1]
    known : Tensor [rows, 1] of bool
        Whether it is sure, and all that is kept is among `best`.
    """
    count = best.shape[1]
    limited = torch.tensor([[p.min_p > 0 or p.top_k > 0] for p in params], device=best.device)
    top_k = torch.tensor([[min(p.top_k, count)] for p in params], device=best.device)
    kth = best.gather(1, (top_k - 1).clamp_(0, count - 1)).masked_fill_(top_k < 1, -math.inf)
    lowest = torch.maximum(_column([p.min_p for p in params], best).log(), kth)
    left = best.masked_fill(best < lowest, -math.inf)
    known = best[:, -1:] < lowest
    total = torch.where(limited, left.logsumexp(dim=-1, keepdim=True), total)
    top_p = _column([p.top_p if p.top_p < 1 else math.inf for p in params], best)
    num_short = ((left - total).exp_().cumsum(dim=-1) < top_p).sum(dim=-1, keepdim=True)
    reaching = best.gather(1, num_short.clamp(max=count - 1)).masked_fill_(num_short == count, -math.inf)
    lowest = torch.maximum(lowest, reaching)
    return lowest, known | (~limited & (best[:, -1:] < lowest)) | whole


def _draw_cut(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw from what cuts leave of logits whose largest is 0.

    Looks at more and more of the most likely tokens until all that a row keeps are among them: full sorts are rare.
    """
    vocab_size, device = logits.shape[-1], logits.device
    words = torch.from_numpy(random_words(rows)).to(device)
    total = -torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True).log_()
    drawn = torch.zeros(len(rows), dtype=torch.int64, device=device)
    open_rows = list(range(len(rows)))
    count = min(max(128, *(1 + row.params.top_k for row in rows)), vocab_size)
    while open_rows:
        whole = len(open_rows) == len(rows)
        best, tokens = (logits if whole else logits[open_rows]).topk(count, dim=-1)
        params = [rows[i].params for i in open_rows]
        lowest, known = _lowest(best, total if whole else total[open_rows], params, count == vocab_size)
        best = best.masked_fill_(best < lowest, -math.inf)
        best += _noise(words[open_rows], _token_words(vocab_size, device)[tokens])
        drawn[open_rows] = tokens.gather(1, best.argmax(dim=-1, keepdim=True))[:, 0]
        open_rows = [i for i, done in zip(open_rows, known[:, 0].tolist(), strict=True) if not done]
        count = min(8 * count, vocab_size)
    return drawn


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """Draw the tokens [rows] of random rows of `logits` [rows, vocab]."""
    # The maximum is taken off first: a small temperature then overflows to -inf only, never to inf - inf.
    logits = logits - logits.amax(dim=-1, keepdim=True)
    logits /= _column([row.params.temperature for row in rows], logits)
    if _is_cut(rows[0].params):
        return _draw_cut(logits, rows)
    logits += _gumbel(rows, logits.shape[-1], logits.device)
    return _argmax(logits)


def _argmax(logits: Tensor) -> Tensor:
    """Return the lowest place of the largest of each row [rows]."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))  # takes a tenth of the time of PyTorch's


def sample(logits: Tensor, rows: Sequence[SamplingRow], eos_token_ids: Collection[int] = ()) -> Tensor:
    """Choose the next token of each row.

    The order is vLLM's: grammar, logit bias, ``min_tokens``, penalties, temperature, min-p, top-k, top-p. Random rows
    take the arg-max of their logits plus Gumbel noise, which draws from their softmax; the noise of a token depends on
    the row's key and position and on the token's id alone, so neither batch, nor slot, nor device changes what a row
    draws.

    Parameters
    ----------
    logits : Tensor [rows, vocab] float32
        Raw logits, left as they are. ``-inf`` bans a token; rows named by `invalid_rows` get a meaningless token.
    rows : sequence of SamplingRow
        One for each row of `logits`.
    eos_token_ids : collection of int
        The model's end-of-text ids, banned before ``min_tokens`` unless ``ignore_eos``.

    Returns
    -------
    Tensor [rows] int64
        Token ids. Greedy rows take the lowest of equally likely ids.
    """
    logits = edited_logits(logits, rows, eos_token_ids)
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    kinds: dict[bool | None, list[int]] = defaultdict(list)  # rows that are alike: greedy, cut or neither
    for i, row in enumerate(rows):
        kinds[None if row.params.is_greedy else _is_cut(row.params)].append(i)
    # On a CPU blocks that fit its cache take half the time; a GPU wants all the work at once.
    size = max(1, _CACHED_LOGITS // logits.shape[-1]) if logits.device.type == "cpu" else len(rows)
    for kind, alike in kinds.items():
        for start in range(0, len(alike), size):
            block = alike[start : start + size]
            mine = logits[start : start + size] if len(kinds) == 1 else logits[block]  # a view where that will do
            tokens[block] = _argmax(mine) if kind is None else _draw(mine, [rows[i] for i in block])
    return tokens


def spread(logits: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return logits of all tokens [rows, vocab_size], given those of some [rows, tokens]; the others are unlikely."""
    return logits.new_full((len(logits), vocab_size), UNLIKELY).index_copy_(1, tokens, logits)


def leanings(
    logits: Tensor,
    rows: Sequence[SamplingRow],
    eos_token_ids: Collection[int] = (),
    tokens: Tensor | None = None,
    vocab_size: int = 0,
) -> Tensor:
    """Return what `sample` takes the arg-max of, float32 [rows, vocab], but for the cuts of min-p, top-k and top-p.

    Of another model's logits, this is what to guess a row's token by: the noise that it will be drawn with is known.

    Parameters
    ----------
    logits, rows, eos_token_ids
        See `sample`.
    tokens : Tensor [columns] int64, optional
        What the columns of `logits` stand for, of `vocab_size` tokens; all in order by default.
    """
    logits = logits.float()
    if tokens is None:
        words = _token_words(logits.shape[-1], logits.device)
        logits = edited_logits(logits, rows, eos_token_ids)
    else:
        words = _token_words(vocab_size, logits.device)[tokens]
        if edited := [i for i, row in enumerate(rows) if row.constraint is not None or _is_edited(row)]:
            whole = spread(logits[edited], tokens, vocab_size)
            mine = edited_logits(whole, [rows[i] for i in edited], eos_token_ids)[:, tokens]
            logits = logits.index_copy(0, torch.tensor(edited, device=logits.device), mine)
    drawn = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not drawn:
        return logits
    scaled = logits[drawn] / _column([rows[i].params.temperature for i in drawn], logits)
    scaled += _noise(torch.from_numpy(random_words([rows[i] for i in drawn])).to(logits.device), words)
    return logits.index_copy(0, torch.tensor(drawn, device=logits.device), scaled)


@dataclass(frozen=True)
class Distributions:
    """What rows believe of their next tokens, ready for the question which of many rows' tokens are the likeliest.

    Nobody writes down all log-probabilities for that: that of token ``t`` in row ``r`` is
    ``table[r, t] - tops[r] - totals[r]``, from the left to the right, as in a log-softmax.

    Attributes
    ----------
    table : Tensor [rows, vocab]
        Logits as the model gave them, perhaps of 16 bits; or log-probabilities in float32.
    tops, totals : Tensor [rows] float32
        Of logits, the largest of each row, and the natural logarithm of the sum of exponentials of what they are less
        than that. 0 for log-probabilities.
    peaks : Tensor [rows, chunks] float32
        The largest of each `CHUNK` columns of `table`, the last of them perhaps fewer.
    """

    table: Tensor
    tops: Tensor
    totals: Tensor
    peaks: Tensor

    @classmethod
    def of(cls, logprobs: Tensor) -> Self:
        """Return the distributions of log-probabilities [rows, vocab]."""
        whole = logprobs.shape[1] // CHUNK * CHUNK
        peaks = logprobs[:, :whole].unflatten(1, (whole // CHUNK, CHUNK)).amax(-1)
        if whole < logprobs.shape[1]:
            peaks = torch.cat([peaks, logprobs[:, whole:].amax(-1, keepdim=True)], dim=1)
        nothing = torch.zeros_like(peaks[:, 0])
        return cls(logprobs, nothing, nothing, peaks)

    @property
    def logprobs(self) -> Tensor:
        """All log-probabilities [rows, vocab]."""
        return (self.table - self.tops[:, None]).sub_(self.totals[:, None])

    def invalid_rows(self) -> Tensor:
        """Tell the rows [rows] (bool) whose logits were no distribution; see `invalid_rows`."""
        return ~(self.peaks.amax(-1) - self.tops - self.totals).isfinite()

    def at(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-probabilities of single tokens, one of each of `rows`."""
        return (self.table[rows, tokens] - self.tops[rows]).sub_(self.totals[rows])

    def top_sums(self, offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the largest of ``logprobs + offsets[:, None]``, the largest first.

        They stand in the chunks of rows whose own largest are the largest, one chunk for each that is wanted at most.

        Parameters
        ----------
        offsets : Tensor [rows] float32
        count : int
            How many, at most all.

        Returns
        -------
        values : Tensor [count] float32
        places : Tensor [count] int64
            Where they stand, row times columns plus column; means nothing where the value is ``-inf``.
        """
        columns, chunks = self.table.shape[1], self.peaks.shape[1]
        sums = (self.peaks - self.tops[:, None]).sub_(self.totals[:, None]).add_(offsets[:, None])
        best = sums.flatten().topk(min(count, sums.numel())).indices
        row, chunk = best // chunks, best % chunks
        column = chunk[:, None] * CHUNK + torch.arange(CHUNK, device=sums.device)
        values = self.at(row[:, None], column.clamp(max=columns - 1)).add_(offsets[row][:, None])
        tops = values.masked_fill_(column >= columns, -math.inf).flatten().topk(count)
        return tops.values, (row[:, None] * columns + column).flatten()[tops.indices]

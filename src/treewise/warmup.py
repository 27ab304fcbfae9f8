"""What a GPU does before the first request: kernels are compiled, and common steps of decoding captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from treewise.batch import Batch
from treewise.choices import choose
from treewise.config import SamplingParams
from treewise.graphs import padded
from treewise.kv import Count, KVManager, OutOfSlots, make_pool
from treewise.plan import TreeSpec
from treewise.results import format_bytes
from treewise.runner import Runner
from treewise.sampler import SamplingRow
from treewise.tree import Forest, Node

PROMPT = 4096
"""Tokens of a prompt that graphs have room for."""
APART = 64
"""Most leaves of which each has such a prompt of its own."""
TAIL = 128
"""Tokens behind what is kept of such a prompt."""
CHUNK = 512
"""Rows of a prompt that is computed."""
DRAWS = (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.9))
"""How tokens are drawn, each with kernels of its own."""

logger = logging.getLogger("treewise")


def warm_up(runner: Runner, max_num_rows: int, capture_rows: int, counts: Sequence[Count] | None = None) -> None:
    """Compute a prompt, draw tokens, and capture steps of up to `capture_rows` rows, where steps are captured.

    Nothing is left of it but what was compiled and captured: all keys go to the slot that nobody reads.

    Parameters
    ----------
    runner : Runner
    max_num_rows : int
        The most rows of a step.
    capture_rows : int
        0: nothing is done.
    counts : sequence of Count, optional
        What layers keep of a prompt of `PROMPT` tokens: steps behind such prompts are captured as well.
    """
    graphs, device = runner.graphs, runner.device
    if graphs is None or not capture_rows:
        return
    start, used = perf_counter(), _used(device)
    chunk = min(CHUNK, max_num_rows)
    runner.rehearse(TreeSpec([-1], [chunk], [0] * chunk, range(chunk)))
    # Those that follow find room in the memory of the largest.
    for rows in reversed(sizes(min(capture_rows, max_num_rows))):
        for tree, grows in common_trees(rows):
            runner.make_ready(tree, rows, grows)
        if counts is not None:
            kv = KVManager(Forest(), make_pool("paged", runner.k.shape[1], runner.page_size), False, runner.k.shape[2])
            for batch in thinned_out(rows, counts, kv):
                runner.make_ready_for(batch, kv)
        _draw(runner, rows)
    seconds, taken = perf_counter() - start, format_bytes(max(0, _used(device) - used))
    logger.info("captured %d graphs in %.1f s, %s", graphs.num_captures, seconds, taken)


def sizes(rows: int) -> list[int]:
    """List the rows of the graphs that serve steps of up to so many.

    Examples
    --------
    >>> sizes(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 24]
    """
    return sorted({padded(number) for number in range(1, rows + 1)})


def common_trees(rows: int) -> list[tuple[TreeSpec, bool]]:
    """Return trees of so many rows whose plans want different kernels: what most other trees want is among it.

    Returns
    -------
    list of (TreeSpec, bool)
        Prompts of their own; branches that outweigh their prompt, and guesses behind one that outweighs them, which
        rows read in narrow tiles and in wide ones. The rows of the latter come in order, and in another. With each
        tree, whether its leaves grow.
    """
    trees = [(TreeSpec([-1] * rows, [PROMPT] * rows, range(rows)), True)] if rows <= APART else []
    branches, guesses = [2 * PROMPT // rows] * rows, [1] * (rows - 1)
    for order in (1, -1) if rows > 1 else ():
        trees.append((TreeSpec([-1] + [0] * rows, [PROMPT, *branches], range(1, rows + 1)[::order]), True))
        trees.append((TreeSpec([-1, 0], [PROMPT, rows - 1], [0, *guesses][::order]), False))
    return trees


def thinned_out(rows: int, counts: Sequence[Count], kv: KVManager) -> Iterator[Batch]:
    """Yield batches of so many leaves that stand on what is kept of prompts, where `kv`, which is nobody's, has room.

    Those of prompts of their own, and those of branches that share one. Each is there until the next is asked for.

    Parameters
    ----------
    rows : int
    counts : sequence of Count
        Tokens that each layer keeps of a prompt.
    kv : KVManager
        Without anything in it, and so it is left.
    """
    for prompts in dict.fromkeys([rows if rows <= APART else 1, 1]):
        stumps = [kv.hold(kv.seal([number, *[0] * (PROMPT - 1)], "")) for number in range(prompts)]
        leaves: list[Node] = []
        if all(kv.keep(stump, counts) is not None for stump in stumps):
            try:
                for number in range(rows):
                    leaves.append(leaf := kv.hold(kv.forest.add(stumps[number % prompts], [0] * TAIL)))
                    kv.extend(leaf, TAIL - 1)
                    leaf.computed = TAIL - 1
                yield Batch.of_leaves(leaves, leaves, kv)
            except OutOfSlots:
                pass
        kv.drop([*leaves, *stumps], keep=0)


@torch.inference_mode()
def _draw(runner: Runner, rows: int) -> None:
    """Draw tokens of so many rows, in each way that has kernels of its own."""
    model = runner.model
    logits = model.logits(torch.zeros((rows, model.config.hidden_size), dtype=runner.dtype, device=runner.device))
    for params in DRAWS:
        choose(logits, [SamplingRow(params, key=0, position=0)] * rows).read()


def _used(device: torch.device) -> int:
    """Return the bytes of a GPU's memory that are not free."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free

"""Plans for CUDA graphs: arrays of fixed size and address, which one plan after another is loaded into."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from treewise.attention.triton import Launch, TritonBackend, prepare
from treewise.plan import Plan
from treewise.plan.data import upload
from treewise.plan.devices import multiprocessors

DEEPEST = 32
"""Key tokens a row that there is room for at least: a wide search that branches less and less fits to its end."""
TOKENS = 1 << 16
"""Key tokens that there is room for at least: 20 branches of 3,000 tokens, in less than a megabyte."""
WIDEST = 128
"""Packed rows of the widest items."""


class PlanBuffers:
    """Room for the plans of one captured graph, whose trees fork, grow and are pruned between replays.

    Each kernel of the capture runs as many programs as there is room for items; those without an item return at once.

    Parameters
    ----------
    plan : Plan
        The sizes are those of this plan, rounded up, or what steps of so many rows usually want; it is loaded.
    rows : int, optional
        Queries that a run of ``buffers.plan`` takes, at least those of the plan; the results of those that a loaded
        plan does not have are 0. Default as many as the plan has.

    Raises
    ------
    ValueError
        If there are fewer rows than the plan has, or its kind of mask has no fixed size.

    Attributes
    ----------
    plan : Plan
        What to capture: ``run_plan(buffers.plan, q, k, v)`` with q of `rows` queries.

    Examples
    --------
    >>> buffers = PlanBuffers(plan, rows=64)  # doctest: +SKIP
    >>> with torch.cuda.graph(graph):  # doctest: +SKIP
    ...     out = run_plan(buffers.plan, q, k, v)
    >>> buffers.load(next_plan)  # doctest: +SKIP
    >>> graph.replay()  # doctest: +SKIP
    """

    def __init__(self, plan: Plan, rows: int | None = None) -> None:
        if plan.mask != "intervals":
            raise ValueError(f"mask is {plan.mask!r}; a plan whose size changes needs mask='intervals'")
        rows = plan.num_rows if rows is None else rows
        if rows < plan.num_rows:
            raise ValueError(f"rows is {rows}; the plan has {plan.num_rows}")
        work = prepare(plan)
        # Programs without an item wait for a multiprocessor like others: where all items run at once, none is spare.
        wave = max(1, multiprocessors(plan.device) // plan.num_kv_heads)
        capacity = [_whole_waves(launch.num_items, wave * _at_once(launch)) for launch in work.launches]
        first = [0, *accumulate(capacity)]
        launches = tuple(
            launch._replace(first=start, num_items=items)
            for launch, start, items in zip(work.launches, first, capacity, strict=False)
        )
        merged = min(rows, max(128, _round_up(len(plan.reduce_rows)) + rows - plan.num_rows))
        tokens = max(_round_up(len(plan.kv_slots)), DEEPEST * rows, TOKENS)
        partials = wave * WIDEST // (plan.num_heads // plan.num_kv_heads)  # of as many items as run at once
        sizes = {
            "row_order": rows,
            "row_position": rows,
            "kv_slots": tokens,
            "kv_position": tokens if len(plan.kv_position) else 0,
            "reduce_rows": merged,
            "reduce_indptr": merged + 1,
            "reduce_entries": max(_round_up(plan.num_entries), partials, rows),
        }
        arrays: dict[str, Any] = {name: np.zeros(size, np.int32) for name, size in sizes.items()}
        arrays["items"] = np.zeros((first[-1], 8), np.int32)
        arrays["kv_readers"] = np.zeros(tokens, np.int64)
        extra: dict[str, Any] = {
            "reduce_queries": arrays["reduce_rows"],
            "mask_words": plan.mask_words,
        }
        self.plan: Plan = replace(
            plan,
            **arrays,
            num_slots=0,
            room=np.zeros((0, 0), np.int64),
            open_indptr=np.zeros(1, np.int64),
            open_places=np.zeros(0, np.int64),
            tensors={name: array.clone() for name, array in upload(arrays | extra, plan.device).items()},
            prepared={TritonBackend.name: work._replace(launches=launches)},
        )
        self.load(plan)

    def misfit(self, plan: Plan) -> str | None:
        """Say why a plan cannot be loaded; None where it can."""
        mine = self.plan
        for name in ("mask", "num_heads", "num_kv_heads", "head_dim", "dtype", "kv_dtype", "device", "window"):
            if getattr(plan, name) != getattr(mine, name):
                return f"its {name} is {getattr(plan, name)}, that of the buffers is {getattr(mine, name)}"
        for name in ("row_order", "kv_slots", "reduce_entries"):
            if len(getattr(plan, name)) > len(getattr(mine, name)):
                return f"it has {len(getattr(plan, name))} {name}, the buffers hold {len(getattr(mine, name))}"
        merged = len(plan.reduce_rows) + mine.num_rows - plan.num_rows
        if merged > len(mine.reduce_rows):
            return f"it has {merged} rows to merge, the buffers hold {len(mine.reduce_rows)}"
        if prepare(mine).ordered and not prepare(plan).ordered:
            return "its rows are not in the order of the queries, those of the buffers are"
        if self._assign(plan) is None:
            return "its items need other kernels, or more of them"
        return None

    def excess(self, plan: Plan) -> tuple[bool, int, int, bool]:
        """Tell how much more than a plan that fits needs the kernels of the capture are made for.

        Returns
        -------
        (bool, int, int, bool)
            Whether they are made for items of another kind, how many packed rows and how many items they have to
            spare, and whether they look up an order of rows that the plan does not need. Of two captures that fit, the
            one whose tuple is smaller takes less time.
        """
        mine, wanted = prepare(self.plan), prepare(plan)
        rows, items = (
            sum(getattr(launch, name) for launch in mine.launches)
            - sum(getattr(launch, name) for launch in wanted.launches)
            for name in ("packed", "num_items")
        )
        return self.plan.kernel_bounds != plan.kernel_bounds, rows, items, wanted.ordered and not mine.ordered

    def load(self, plan: Plan) -> None:
        """Make `plan` the one that the captured graph runs; afterwards `Plan.grow` grows it there.

        Nothing waits for the device: the copies are ordered on the current stream.

        Raises
        ------
        ValueError
            If the plan does not fit; see `misfit`.
        """
        assigned = self._assign(plan)
        if assigned is None or self.misfit(plan):
            raise ValueError(f"the plan does not fit these buffers: {self.misfit(plan)}")
        mine, rows, merged = self.plan, plan.num_rows, len(plan.reduce_rows)
        items = np.zeros_like(mine.items)
        for source, target in assigned:
            items[target.first : target.first + source.num_items] = plan.items[source.first :][: source.num_items]
        # Queries beyond those of the plan are merged from nothing.
        spare = np.arange(rows, mine.num_rows)
        queries = np.full(len(mine.reduce_rows), -1, np.int32)
        queries[: merged + len(spare)] = np.concatenate((plan.row_order[plan.reduce_rows], spare))
        bounds = np.full(len(queries) + 1, plan.num_entries, np.int32)
        bounds[: merged + 1] = plan.reduce_indptr
        small = {"items": items, "reduce_queries": queries, "reduce_indptr": bounds}
        for name, tensor in upload(small, plan.device).items():
            mine.tensors[name].copy_(tensor, non_blocking=True)
        for name in ("row_order", "row_position", "kv_slots", "kv_readers", "kv_position", "reduce_entries"):
            place = mine.tensors[name][: len(plan.tensors[name])]
            place.copy_(plan.tensors[name], non_blocking=True)
            plan.tensors[name] = place

    def _assign(self, plan: Plan) -> list[tuple[Launch, Launch]] | None:
        """Pair each run of a plan's items with a kernel of the capture that can take it."""
        pairs, free = [], list(prepare(self.plan).launches)
        for launch in prepare(plan).launches:
            taker = next((kernel for kernel in reversed(free) if _takes(kernel, launch)), None)
            if taker is None:
                return None
            free.remove(taker)
            pairs.append((launch, taker))
        return pairs


def _takes(kernel: Launch, launch: Launch) -> bool:
    fits = launch.packed <= kernel.packed and launch.num_items <= kernel.num_items
    return fits and kernel.masked >= launch.masked and launch.run % kernel.run == 0


def _at_once(launch: Launch) -> int:
    """Return how many programs of a launch a multiprocessor runs at once, at least."""
    return 1 if launch.packed > WIDEST // 2 else 2


def _whole_waves(items: int, wave: int) -> int:
    """Leave a quarter free where there are several waves, in steps of one."""
    waves = -(-items // wave)
    return wave * (waves + waves // 4)


def _round_up(size: int) -> int:
    """Leave a quarter free, in steps that grow with the size."""
    step = max(16, 2 ** max(0, size.bit_length() - 2))
    return -(-(size + size // 4) // step) * step if size else 0

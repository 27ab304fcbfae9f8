"""CUDA graphs of decoding steps: captured once a size, replayed while trees fork, grow and are pruned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from treewise.attention import Plan


class Kind(NamedTuple):
    """Layers that share a plan.

    Attributes
    ----------
    window : int or None
        Their sliding window; None is full attention.
    first : int
        They are the layers of this window from the first up to the next kind's first. The plan's slots are numbered
        from that layer's part of the pool on, see `treewise.kv.kept.Kept.slots_from`.
    heads : tuple of int or None
        KV heads each of which has queries of its own in the plan: those of the first row come first. None stands for
        all of them together.
    """

    window: int | None
    first: int = 0
    heads: tuple[int | None, ...] = (None,)


Plans = Mapping[Kind, Plan]
"""The plan of each kind of layers."""
Compute = Callable[..., Tensor]
"""A forward: tokens, positions, slots and perhaps more of the rows, each int64 [rows], and plans; gives a tensor
[rows, hidden]."""
Capture = Callable[[Callable[[], Tensor]], tuple[Callable[[], object], Tensor]]
"""Runs a function, and returns what runs it again and the tensor that its results then are in."""


class StepGraph:
    """A captured forward of up to `rows` rows, and the arrays that it reads.

    Parameters
    ----------
    compute : Compute
    capture : Capture
    rows : int
    num_inputs : int
        What `compute` takes of each row.
    plans : Plans
        What there has to be room for; a quarter more is left.
    spare_slot : int
        Where rows beyond those of a step store their keys.
    """

    def __init__(
        self, compute: Compute, capture: Capture, rows: int, num_inputs: int, plans: Plans, spare_slot: int
    ) -> None:
        # Imported here because Triton is not there on every machine.
        from treewise.attention.buffers import PlanBuffers

        self.rows = rows
        self.spare_slot = spare_slot
        self._plans = plans
        device = next(iter(plans.values())).device
        self._inputs = torch.zeros((num_inputs, rows), dtype=torch.int64, device=device)
        self._inputs[2] = spare_slot
        self._buffers = {kind: PlanBuffers(plan, rows * len(kind.heads)) for kind, plan in plans.items()}
        fixed = {kind: buffers.plan for kind, buffers in self._buffers.items()}
        self._replay, self._hidden = capture(lambda: compute(*self._inputs, fixed))

    def runs(self, plans: Plans) -> bool:
        """Whether these plans are those of the last run."""
        return plans is self._plans

    def excess(self, plans: Plans) -> list[tuple[bool, int, int, bool]] | None:
        """Tell how much more than these plans need the graph is made for, see `PlanBuffers.excess`; None: it is not."""
        if self._buffers.keys() != plans.keys():
            return None
        pairs = [(self._buffers[kind], plan) for kind, plan in plans.items()]
        if any(buffers.misfit(plan) is not None for buffers, plan in pairs):
            return None
        return [buffers.excess(plan) for buffers, plan in pairs]

    def run(self, inputs: Tensor, plans: Plans) -> Tensor:
        """Run a step.

        Parameters
        ----------
        inputs : Tensor [inputs, rows], int64
            Tokens, positions, slots and what else `compute` takes.
        plans : Plans
            Those of the last run may have grown; others must fit.

        Returns
        -------
        Tensor
            What `compute` gives for the rows [rows, hidden]; the next run of any graph ends it.
        """
        if plans is not self._plans:
            for kind, plan in plans.items():
                self._buffers[kind].load(plan)
            self._plans = plans
        rows = inputs.shape[1]
        self._inputs[:, :rows] = inputs
        if rows < self.rows:
            self._inputs[2, rows:] = self.spare_slot
        self._replay()
        return self._hidden[:rows]


class GraphCache:
    """Finds a graph for a step, and captures one where a kind of step comes back, or beforehand.

    Parameters
    ----------
    compute : Compute
    spare_slot : int
        Where rows beyond those of a step store their keys.
    max_rows : int
        Steps of more rows are not captured.
    max_graphs : int
        The graph that was used least recently makes room for another.
    capture : Capture, optional
        Default `CudaCapture`.
    """

    def __init__(
        self,
        compute: Compute,
        spare_slot: int,
        max_rows: int = 8192,
        max_graphs: int = 128,
        capture: Capture | None = None,
    ) -> None:
        self.compute = compute
        self.spare_slot = spare_slot
        self.max_rows = max_rows
        self.max_graphs = max_graphs
        self.num_captures = 0
        self.num_replays = 0
        self._capture = CudaCapture() if capture is None else capture
        self._graphs: list[StepGraph] = []  # the one used last comes last
        self._missed: set[tuple[Any, ...]] = set()

    def run(self, inputs: Tensor, plans: Plans) -> Tensor | None:
        """Run a step of decoding by a graph; see `StepGraph.run`. None if there is none for it, yet or ever."""
        num_inputs, rows = inputs.shape
        if not self._can_capture(rows, plans):
            return None
        graph = self._find(padded(rows), num_inputs, plans)
        if graph is None:
            return None
        self.num_replays += 1
        return graph.run(inputs, plans)

    def make_ready(self, rows: int, num_inputs: int, plans: Plans) -> None:
        """Capture a graph for steps of so many rows under plans like these, unless there is one.

        Parameters
        ----------
        rows : int
            As `padded` gives them.
        num_inputs : int
            What `compute` takes of each row.
        plans : Plans
            Of at most so many rows.
        """
        if self._can_capture(rows, plans):
            best = min(self._fitting(rows, plans), default=None)
            if best is None or any(is_other for is_other, *_ in best[0]):
                self._capture_for(rows, num_inputs, plans)

    def clear(self) -> None:
        """Forget all graphs, as `compute` will do something else from now on."""
        self._graphs.clear()

    def _can_capture(self, rows: int, plans: Plans) -> bool:
        return rows <= self.max_rows and all(plan.mask == "intervals" for plan in plans.values())

    def _find(self, rows: int, num_inputs: int, plans: Plans) -> StepGraph | None:
        graphs = self._graphs
        found = next((place for place in reversed(range(len(graphs))) if graphs[place].runs(plans)), None)
        if found is None and (fitting := self._fitting(rows, plans)):
            found = min(fitting)[1]
        if found is not None:
            graphs.append(graphs.pop(found))
            return graphs[-1]
        # A shape that came once may never come again: the second time is worth a capture.
        kind = (rows, *(len(plan.kv_slots).bit_length() for plan in plans.values()))
        if kind not in self._missed:
            self._missed.add(kind)
            return None
        return self._capture_for(rows, num_inputs, plans)

    def _fitting(self, rows: int, plans: Plans) -> list[tuple[list[tuple[bool, int, int, bool]], int]]:
        """Return how much more than needed the graphs that fit are made for, and where they are."""
        sized = [(place, graph) for place, graph in enumerate(self._graphs) if graph.rows == rows]
        return [(excess, place) for place, graph in sized if (excess := graph.excess(plans)) is not None]

    def _capture_for(self, rows: int, num_inputs: int, plans: Plans) -> StepGraph:
        if len(self._graphs) == self.max_graphs:
            del self._graphs[0]
        self.num_captures += 1
        self._graphs.append(StepGraph(self.compute, self._capture, rows, num_inputs, plans, self.spare_slot))
        return self._graphs[-1]


class CudaCapture:
    """Captures functions as CUDA graphs, all in one pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        """Capture `function`; see `Capture`."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            function()  # compiles what was not compiled yet
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = function()
        return graph.replay, result


def padded(rows: int) -> int:
    """Return the rows of the graph that serves so many: two sizes up to each power of two, four above 256.

    Products take as long as the weights' way to the multiprocessors up to some 200 rows, and grow with the rows above.

    Examples
    --------
    >>> [padded(rows) for rows in (1, 2, 3, 5, 9, 13, 20, 50, 300, 5000)]
    [1, 2, 3, 6, 12, 16, 24, 64, 320, 5120]
    """
    power = 1 << (rows - 1).bit_length()
    step = max(1, power // (4 if power <= 256 else 8))
    return -(-rows // step) * step

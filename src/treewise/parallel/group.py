"""Ranks that compute together: what they sum, gather and hear from the first, by torch.distributed."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store

CONNECTING = timedelta(minutes=5)
"""Ranks that have started wait so long for each other to connect."""
PATIENCE = timedelta(days=365)
"""A rank waits so long for what others do next: they may be loading, or nobody may ask for anything."""
FIRST = 1 << 14
"""Bytes of a message that come at once; the rest of a longer one comes behind."""


class Group:
    """Collective operations of the ranks of one model, on tensors of its device and on bytes of the host.

    All ranks call the same in the same order. Nothing of it is known to the process beside this object, so that several
    models may live in one.

    Parameters
    ----------
    store : Store
        By which the ranks find each other.
    rank, size : int
    device : torch.device
        Of the tensors: on CUDA devices NCCL moves them, on a CPU gloo.
    is_local : bool
        Whether all ranks are on this machine.
    """

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, is_local: bool) -> None:
        self.rank, self.size = rank, size
        self._host: Any = _gloo(PrefixStore("host", store), rank, size, is_local)
        self._device: Any = self._host
        if device.type == "cuda":
            # NOTE: multicast objects of NVLink must not be made here; NCCL reads this when its first group begins.
            os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = CONNECTING
            self._device = dist.ProcessGroupNCCL(PrefixStore("device", store), rank, size, options)

    def sum(self, x: Tensor) -> Tensor:
        """Replace a contiguous tensor by the sum of all ranks', in its own type; may be captured in a CUDA graph."""
        _reduce(self._device, x, dist.ReduceOp.SUM)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which are alike, on rank 0; elsewhere none."""
        options = dist.GatherOptions()
        options.rootRank, options.timeout = 0, PATIENCE
        shares = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        self._device.gather([shares] if shares else [], [x], options).wait()
        return shares

    def broadcast(self, x: Tensor) -> Tensor:
        """Replace a contiguous tensor by that of rank 0."""
        _broadcast(self._device, x)
        return x

    def least(self, number: int) -> int:
        """Return the least number of all ranks; the host waits for all of them."""
        own = torch.tensor([number], dtype=torch.int64)
        _reduce(self._host, own, dist.ReduceOp.MIN)
        return int(own)

    def total(self, number: int) -> int:
        """Return the sum of all ranks' numbers; the host waits for all of them."""
        own = torch.tensor([number], dtype=torch.int64)
        _reduce(self._host, own, dist.ReduceOp.SUM)
        return int(own)

    def say(self, message: bytes) -> None:
        """Send a message to the other ranks, from rank 0."""
        whole = np.empty(max(FIRST, 8 + len(message)), np.uint8)
        whole[:8] = np.array([len(message)], np.int64).view(np.uint8)
        whole[8 : 8 + len(message)] = np.frombuffer(message, np.uint8)
        there = torch.from_numpy(whole)
        _broadcast(self._host, there[:FIRST])
        if len(whole) > FIRST:
            _broadcast(self._host, there[FIRST:])

    def hear(self) -> bytes:
        """Wait for what rank 0 says, on another rank."""
        first = torch.empty(FIRST, dtype=torch.uint8)
        _broadcast(self._host, first)
        length = int(first[:8].view(torch.int64))
        if 8 + length <= FIRST:
            return first.numpy()[8 : 8 + length].tobytes()
        rest = torch.empty(8 + length - FIRST, dtype=torch.uint8)
        _broadcast(self._host, rest)
        return first.numpy()[8:].tobytes() + rest.numpy().tobytes()

    def close(self) -> None:
        """End the connections of the host; nothing can be asked for any more.

        NOTE: gloo's threads abort a process that ends while they run.
        """
        if self._device is self._host:
            self._device = None
        self._host = None

    def abort(self) -> None:
        """End what waits on the device for a rank that is gone; all that is asked for later fails."""
        if self._device is not None and self._device is not self._host:
            self._device.abort()


def _gloo(store: Store, rank: int, size: int, is_local: bool) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # which has more than it is declared to have
    options = gloo._Options()
    options._timeout = CONNECTING
    # Between machines, the address that this one's name stands for; it need not be one that the machine itself reaches.
    here = {"hostname": "127.0.0.1"} if is_local else {}
    options._devices = [gloo.create_device(**here)]
    return gloo(store, rank, size, options)


def _reduce(group: Any, x: Tensor, how: dist.ReduceOp.RedOpType) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp, options.timeout = dist.ReduceOp(how), PATIENCE
    group.allreduce([x], options).wait()


def _broadcast(group: Any, x: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, PATIENCE
    group.broadcast([x], options).wait()

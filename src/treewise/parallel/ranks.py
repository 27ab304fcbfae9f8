"""The ranks of a model as rank 0 sees them: how they are started, watched, told and ended."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import FrameType
from weakref import finalize

import torch
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous

from treewise.models import CausalLM, load_decoder, locate
from treewise.models.load import load_config, shape_of
from treewise.parallel.follower import Errand, follow, load_share
from treewise.parallel.group import Group
from treewise.parallel.model import check_size
from treewise.parallel.orders import Order, write

ENDING = 5.0
"""Seconds that a process has to end when it is asked to."""
NOTICED = 1.0
"""Seconds within which a process that ended is known to have ended, once its connections broke."""


class RankLost(RuntimeError):
    """Ranks have ended, so that the model cannot be computed any more; it has to be loaded again."""


class Processes:
    """The other ranks on this machine, a process each, which end when this one does.

    Parameters
    ----------
    size : int
        Of all ranks.
    device : str
        ``"cpu"``, or ``"cuda"``, of which each rank has one.
    model : str
    dtype : str or torch.dtype

    Attributes
    ----------
    store : Store
    """

    def __init__(self, size: int, device: str, model: str, dtype: str | torch.dtype) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.store: Store = store
        self.group: Group | None = None  # to be aborted when a process ends
        self._lost: list[str] = []
        self._is_closed = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # A module is run by its name, so that nothing of the caller's own script is run again, whatever it is.
        command = [sys.executable, "-P", "-c", "from treewise.parallel.follower import main; main()"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        if device == "cpu":
            environment.setdefault("OMP_NUM_THREADS", str(threads_of_each(size)))
        try:
            for rank in range(1, size):
                # In a session of its own, as an interrupt from the terminal is rank 0's alone.
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
                self._processes[rank] = process
                threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
                where = device if device == "cpu" else f"{device}:{rank}"
                assert process.stdin is not None
                process.stdin.write(pickle.dumps(Errand(store.port, rank, size, where, model, dtype)))
                process.stdin.flush()
            while not store.check([f"started {rank}" for rank in self._processes]):
                if self._lost:
                    raise RankLost(self.loss())
                time.sleep(0.01)
        except BaseException:
            self.close()
            raise

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._is_closed:
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._lost.append(f"rank {rank} {how}")
        if self.group is not None:
            self.group.abort()

    def loss(self) -> str:
        """Tell which ranks have ended and what they said, nothing if none has."""
        errors = []
        for rank in self._processes:
            if self._lost and self.store.check([f"error {rank}"]):
                errors.append(f"\n\nrank {rank}: {self.store.get(f'error {rank}').decode()}")
        return "; ".join(self._lost) + "".join(errors)

    def close(self) -> None:
        """End the processes."""
        self._is_closed = True
        for process in self._processes.values():
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        deadline = time.monotonic() + ENDING
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Ranks:
    """What rank 0 tells the others.

    Parameters
    ----------
    group : Group
    processes : Processes, optional
        Where they were started from here; else they were by torchrun.
    """

    def __init__(self, group: Group, processes: Processes | None) -> None:
        self.group = group
        self.end: str | None = None  # why the ranks have ended
        self._processes = processes
        self._next = count()
        self._numbers: dict[int, int] = {}  # of what is kept on all ranks, by identity
        self._dropped: list[int] = []
        self._process_id = os.getpid()

    def next_number(self) -> int:
        """Return a number for a runner, or for what is kept, that no other has."""
        return next(self._next)

    def keep(self, number: int, result: object) -> None:
        """Let a number stand for what came of a call on each rank, as long as it is there on this one."""
        self._numbers[id(result)] = number
        finalize(result, self._let_go, id(result), number).atexit = False

    def number_of(self, result: object) -> int:
        """Return the number of what is kept."""
        return self._numbers[id(result)]

    def _let_go(self, identity: int, number: int) -> None:
        del self._numbers[identity]
        self.drop(number)

    def drop(self, number: int) -> None:
        """Let go a runner, or what was kept; the others hear of it with the next order."""
        self._dropped.append(number)

    def tell(self, order: Order) -> None:
        """Send an order to the other ranks, from within `together`."""
        dropped, self._dropped = self._dropped, []
        self.group.say(write(order, dropped, self._numbers))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Do within this what an order asks for; whatever fails there leaves ranks waiting for each other: they end.

        An interrupt from the keyboard comes behind it.

        Raises
        ------
        RankLost
            If ranks have ended, before or meanwhile.
        """
        self.check()
        interrupts = _Interrupts()
        try:
            with interrupts:
                yield
        except BaseException as error:
            lost = self._loss(NOTICED if isinstance(error, RuntimeError) else 0.0)
            self.close(lost or f"they were ended, as {type(error).__name__} came up between what ranks do together")
            if lost:
                raise RankLost(f"{lost}; the model has to be loaded again") from error
            raise
        interrupts.pass_on()

    def check(self) -> None:
        """Raise `RankLost` if ranks have ended, so that what was computed last means nothing."""
        if lost := self.end or self._loss(0.0):
            self.close(lost)
            raise RankLost(f"{lost}; the model has to be loaded again")

    def close(self, why: str = "the model was let go") -> None:
        """End the other ranks."""
        if self.end is not None or os.getpid() != self._process_id:  # a fork of this process is not rank 0
            return
        self.end = why
        if self._processes is not None:
            self._processes.close()
        else:
            with suppress(RuntimeError):  # they are gone
                self.group.say(b"")
        self.group.close()

    def _loss(self, seconds: float) -> str:
        """Tell which ranks have ended; perhaps they are about to be known to."""
        if self._processes is None:
            return ""
        deadline = time.monotonic() + seconds
        while not (lost := self._processes.loss()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return lost


class _Interrupts:
    """Keeps the first interrupt from the keyboard that comes while it is entered; a second one is not kept."""

    def __init__(self) -> None:
        self._handler = signal.getsignal(signal.SIGINT)
        self._arguments: tuple[int, FrameType | None] | None = None
        # Only the main thread hears of interrupts.
        self._waits = callable(self._handler) and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> None:
        if self._waits:
            signal.signal(signal.SIGINT, self._keep)

    def __exit__(self, *error: object) -> None:
        if self._waits:
            signal.signal(signal.SIGINT, self._handler)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if self._arguments is not None:
            raise KeyboardInterrupt
        self._arguments = number, frame

    def pass_on(self) -> None:
        """Let the interrupt that was kept come, if there is one."""
        if self._arguments is not None and callable(self._handler):
            self._handler(*self._arguments)


def threads_of_each(size: int) -> int:
    """Return how many threads each of so many ranks on this machine's processor has."""
    return max(1, len(os.sched_getaffinity(0)) // size)


def load(
    name: str | Path, size: int = 1, *, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> CausalLM:
    """Load a model, shared out over ranks if there is to be more than one.

    Where torchrun has started this process, and as many as there are to be ranks, they are the ranks: one of them goes
    on, and the others follow it until it ends, and exit. Else the other ranks are started here, and end with the model.

    Parameters
    ----------
    name, dtype
        See `treewise.models.load_decoder`.
    size : int
        How many ranks.
    device : str or torch.device
        Of a single rank; with several ``"cpu"`` or ``"cuda"``, which is a device each.

    Raises
    ------
    ValueError
        If the model cannot be shared out over so many, or there are not as many devices, or processes of torchrun.
    RankLost
        If a rank could not be started, or failed to load its share.
    """
    if size == 1:
        return load_decoder(name, dtype=dtype, device=device)
    check_size(load_config(name), size)
    kind, model = _kind(device), str(name if shape_of(name) is not None else locate(name))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _join(size, kind, model, dtype)
    if kind == "cuda" and size > torch.cuda.device_count():
        raise ValueError(f"tensor_parallel_size: {size} ranks need a GPU each; there are {torch.cuda.device_count()}")
    processes = Processes(size, kind, model, dtype)
    try:
        here = torch.device(kind if kind == "cpu" else f"{kind}:0")
        group = processes.group = Group(processes.store, 0, size, here, is_local=True)
        ranks = Ranks(group, processes)
        with ranks.together():
            share = load_share(model, dtype, here, group)
    except BaseException:
        processes.close()
        raise
    share.ranks = ranks
    finalize(share, ranks.close)
    if kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        finalize(share, torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(threads_of_each(size))
    return share


def _kind(device: str | torch.device) -> str:
    device = torch.device(device)
    if device.index is not None:
        raise ValueError(f"device: {device} is one, and each rank has its own; give {device.type!r}")
    return device.type


def _join(size: int, kind: str, model: str, dtype: str | torch.dtype) -> CausalLM:
    """Be one of the ranks that torchrun has started."""
    if (started := int(os.environ["WORLD_SIZE"])) != size:
        raise ValueError(f"tensor_parallel_size is {size}, but torchrun has started {started} processes")
    store, rank, _ = next(rendezvous("env://"))
    if rank == 0 and store.add("treewise models", 1) > 1:
        raise ValueError("tensor_parallel_size: under torchrun the ranks belong to the first model that is loaded")
    device = torch.device(kind if kind == "cpu" else f"{kind}:{os.environ.get('LOCAL_RANK', rank)}")
    is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(size)
    group = Group(PrefixStore("treewise", store), rank, size, device, is_local)
    share = load_share(model, dtype, device, group)
    if rank:
        follow(share)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # NOTE: gloo's threads, whose peer is gone, may abort a process that ends in the usual way
    share.ranks = Ranks(group, None)
    finalize(share, share.ranks.close)
    return share

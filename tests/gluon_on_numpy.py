"""Just enough of Gluon on numpy to run a kernel without a GPU, for what a compiler cannot tell: order and indices.

Partitions of a warp specialisation are threads and barriers make them wait, so that a wrong phase or count ends in a
deadlock. Shared memory starts as NaN. A product is made when it is waited for, and reads what its operands hold then.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np


class Tensor(np.ndarray):
    """A tensor or scalar in registers; layouts mean nothing here."""

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return tensor(array)

    def to(self, dtype):
        return tensor(np.asarray(self).astype(dtype))

    @property
    def type(self):
        return SimpleNamespace(layout=None)


def tensor(values) -> Tensor:
    return np.asarray(values).view(Tensor)


class Pointer:
    """Offsets into a flat array."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, np.asarray(offset, np.int64)

    def __add__(self, offset):
        return Pointer(self.array, self.offset + np.asarray(offset, np.int64))

    @property
    def dtype(self):
        return SimpleNamespace(element_ty=self.array.dtype.type)


class Shared:
    """A buffer in shared memory, or a view of one."""

    def __init__(self, array):
        self.array, self.dtype = array, array.dtype.type

    def index(self, place):
        return Shared(self.array[int(place)]) if self.array.dtype != object else self.array[int(place)]

    def slice(self, start, length):
        return Shared(self.array[start : start + length])

    def permute(self, order):
        return Shared(self.array.transpose(order))

    def load(self, layout):
        return tensor(self.array.copy())

    def store(self, values):
        self.array[...] = values


class TensorDescriptor:
    """A matrix whose tiles are copied whole; what lies beyond its edges is zero."""

    layout = None

    def __init__(self, array, block):
        self.array, self.block, self.dtype = array, block, array.dtype.type

    @classmethod
    def from_tensor(cls, tensor, block, layout):
        return cls(tensor.numpy(), block)

    def load(self, corner, barrier, shared):
        """Copy a tile at once; its bytes arrive."""
        row, column = (int(place) for place in corner)
        tile = self.array[row : row + self.block[0], column : column + self.block[1]]
        assert shared.array.shape == tuple(self.block)
        shared.array[...] = 0
        shared.array[: tile.shape[0], : tile.shape[1]] = tile
        barrier.expect(-shared.array.nbytes, arrivals=0)


class Barrier:
    """An mbarrier: a phase ends when as many threads as it was initialised with have arrived, and all bytes."""

    changed = threading.Condition()
    failed: ClassVar[list[BaseException]] = []

    def init(self, count):
        self.count, self.left, self.phase, self.bytes = count, count, 0, 0

    def arrive(self, count=1):
        self.expect(0, arrivals=count)

    def expect(self, size, arrivals=1):
        with self.changed:
            assert arrivals <= self.left, "more arrivals than the barrier waits for"
            self.left -= arrivals
            self.bytes += size
            assert self.bytes >= 0, "more bytes than the barrier waits for"
            if self.left == self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, phase):
        with self.changed:
            done = self.changed.wait_for(lambda: self.failed or self.phase & 1 != int(phase), timeout=20)
            assert done and not self.failed, "waits for ever, or another partition failed"


class Machine(threading.local):
    """What differs from thread to thread: copies under way."""

    def __init__(self):
        self.copies = []


MACHINE = Machine()
GRID = [(0,), (1,)]  # the program's place, and how many there are


def load(pointer, mask=True, other=0):
    offset, mask = np.broadcast_arrays(pointer.offset, np.asarray(mask))
    values = np.full(offset.shape, other, pointer.array.dtype)
    values[mask] = pointer.array[offset[mask]]
    return tensor(values)


def store(pointer, values, mask=True):
    offset, values, mask = np.broadcast_arrays(pointer.offset, np.asarray(values), np.asarray(mask))
    pointer.array[offset[mask]] = values[mask].astype(pointer.array.dtype)


def allocate_shared_memory(dtype, shape, layout):
    if layout == "barriers":
        return Shared(np.array([Barrier() for _ in range(shape[0])], dtype=object))
    return Shared(np.full(shape, np.nan if np.issubdtype(dtype, np.floating) else -1, dtype))


def copy(shared, pointer, mask=True):
    MACHINE.copies.append((shared, pointer, mask))


def copies_arrive(barrier, increment_count=True):
    assert not increment_count
    for shared, pointer, mask in MACHINE.copies:
        shared.store(np.broadcast_to(load(pointer, mask), shared.array.shape))
    MACHINE.copies.clear()
    barrier.arrive(128)


def multiply(a, b, acc, use_acc=True, is_async=False):
    assert is_async

    def product():
        left = a.array if isinstance(a, Shared) else np.asarray(a)
        result = left.astype(np.float32) @ b.array.astype(np.float32)
        return tensor(result + acc if use_acc else result)

    return product


def wait_for_products(outstanding, deps):
    done = [dep() if callable(dep) else dep for dep in deps]
    return done[0] if len(done) == 1 else done


def warp_specialize(partitions, warps, registers):
    def run(function, arguments):
        try:
            function(*arguments)
            assert not MACHINE.copies, "copies that nobody waits for"
        except BaseException as error:
            with Barrier.changed:
                Barrier.failed.append(error)
                Barrier.changed.notify_all()

    threads = [threading.Thread(target=run, args=partition) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if Barrier.failed:
        error = Barrier.failed[0]
        Barrier.failed.clear()
        raise error


class Kernel:
    """A jitted function: called by others, or launched over torch tensors on a CPU."""

    def __init__(self, function):
        self.function = function

    def __call__(self, *arguments):
        return self.function(*arguments)

    def __getitem__(self, grid):
        def launch(*arguments, num_warps, maxnreg, launch_pdl, **constants):
            pointers = [Pointer(x.numpy().reshape(-1)) if hasattr(x, "numpy") else x for x in arguments]
            for program in np.ndindex(*grid):
                GRID[:] = program, grid
                with np.errstate(all="ignore"):
                    self.function(*pointers, **constants)

        return launch


def jit(function=None, **options):
    return Kernel(function) if function else Kernel


def constexpr(value):
    return type("Constant", (type(value),), {"value": value})(value)


LANGUAGE = SimpleNamespace(
    constexpr=constexpr,
    static_range=range,
    int32=np.int32, int64=np.int64, uint32=np.uint32, float32=np.float32, float16=np.float16,
    load=load, store=store, allocate_shared_memory=allocate_shared_memory, warp_specialize=warp_specialize,
    program_id=lambda axis: tensor(GRID[0][axis]), num_programs=lambda axis: tensor(GRID[1][axis]),
    inline_asm_elementwise=lambda *arguments, **options: None,
    arange=lambda start, end, layout: tensor(np.arange(start, end, dtype=np.int32)),
    zeros=lambda shape, dtype, layout: tensor(np.zeros(shape, dtype)),
    full=lambda shape, value, dtype, layout: tensor(np.full(shape, value, dtype)),
    to_tensor=tensor,
    convert_layout=lambda x, layout: x,
    expand_dims=lambda x, axis: tensor(np.expand_dims(x, axis)),
    reshape=lambda x, shape: tensor(np.reshape(x, shape)),
    permute=lambda x, order: tensor(np.transpose(x, order)),
    split=lambda x: (x[..., 0], x[..., 1]),
    where=lambda condition, x, y: tensor(np.where(condition, x, y)),
    maximum=lambda x, y: tensor(np.maximum(x, y)),
    max=lambda x, axis: tensor(np.max(np.asarray(x), axis)),
    sum=lambda x, axis: tensor(np.sum(np.asarray(x), axis)),
    exp=lambda x: tensor(np.exp(x)), exp2=lambda x: tensor(np.exp2(x)), log2=lambda x: tensor(np.log2(x)),
    NVMMASharedLayout=SimpleNamespace(get_default_for=lambda shape, dtype: None),
    **dict.fromkeys(
        ("SwizzledSharedLayout", "BlockedLayout", "SliceLayout", "NVMMADistributedLayout", "DotOperandLayout"),
        lambda *arguments: None,
    ),
)  # fmt: skip
HOPPER = SimpleNamespace(
    async_copy=SimpleNamespace(async_load=copy, mbarrier_arrive=copies_arrive),
    mbarrier=SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=Barrier.init,
        arrive=Barrier.arrive,
        expect=Barrier.expect,
        wait=Barrier.wait,
    ),
    tma=SimpleNamespace(async_load=TensorDescriptor.load),
    TensorDescriptor=TensorDescriptor,
    fence_async_shared=lambda: None,
    warpgroup_mma=multiply,
    warpgroup_mma_wait=wait_for_products,
)


def import_kernels(name: str, monkeypatch) -> ModuleType:
    """Import a second copy of a module of kernels, with the above in place of Gluon."""
    gluon = SimpleNamespace(jit=jit, language=LANGUAGE)
    package = "triton.experimental"
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(gluon=gluon))
    monkeypatch.setitem(sys.modules, f"{package}.gluon", gluon)
    for part in ("language.nvidia", "nvidia"):
        monkeypatch.setitem(sys.modules, f"{package}.gluon.{part}.hopper", HOPPER)
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

"""Products with few rows on Hopper GPUs (compute capability 9.0): a Gluon kernel that starts before its rows are there.

A matrix is no kernel's result. So one warp of each program fetches as much of it as shared memory holds while the
kernels before still run, and only then waits for them and fetches the rows. Four others multiply: the matrix is the
wide operand of the tensor cores, of which its rows are never too few.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton

if tuple(int(number) for number in triton.__version__.split(".")[:2]) < (3, 6):
    raise ImportError(f"Triton is {triton.__version__}; kernels in Gluon need 3.6")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from treewise.attention.backend import power_of_2
from treewise.plan.devices import multiprocessors

_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name until Triton 3.6

COLUMNS = gl.constexpr(64)
"""Inputs of a step: 128 bytes, which one row of a swizzled tile holds."""
MOST_ROWS = 128
"""Rows of the widest tile; more are left to PyTorch."""
SHARED_MEMORY, MOST_STAGES = 224 << 10, 12
"""Bytes of a multiprocessor for the steps that are under way at once; the most of these of a program."""
AHEAD = 2
"""Steps of gates that are fetched before the rows are there: more would be in the way of who makes the rows."""


def suits(x: torch.Tensor, weight: torch.Tensor, gated: bool = False) -> bool:
    """Whether `multiply` can serve these, and is likely faster than PyTorch: up to 128 rows of 16 bits."""
    outputs, inputs = weight.shape
    return (
        0 < len(x) <= MOST_ROWS
        and x.dtype == weight.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and inputs % COLUMNS.value == 0
        and outputs % (128 if gated else 64) == 0
        and all(each.is_contiguous() and each.data_ptr() % 16 == 0 for each in (x, weight))
    )


def is_whole(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `multiply` makes the whole product of rows few enough to be faster than PyTorch with it."""
    return len(x) <= 64 and _splits(weight) == 1


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = ""
) -> torch.Tensor:
    """Multiply rows with the transpose of a matrix, where `suits` allows it.

    Parameters
    ----------
    x : Tensor [rows, inputs]
    weight : Tensor [outputs, inputs]
    bias : Tensor [outputs], optional
        Added to each row of the product.
    activation : str
        Return ``activation(gate) * up`` of the product [rows, 2 * size], gates first; see `treewise.ops.ACTIVATIONS`.

    Returns
    -------
    Tensor
        [rows, outputs], or [rows, size]; or [parts, rows, outputs], float32, to be summed up.
    """
    rows, inputs = x.shape
    gated = bool(activation)
    outputs = len(weight) // (1 + gated)
    splits = 1 if gated else _splits(weight)
    width, block = max(16, power_of_2(rows)), 128 if gated else 64
    element = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    read = [
        TensorDescriptor.from_tensor(tensor, tile, gl.NVMMASharedLayout.get_default_for(tile, element))
        for tensor, tile in ((x, [width, COLUMNS.value]), (weight, [64, COLUMNS.value]))
    ]
    shape, dtype = ((rows, outputs), x.dtype) if splits == 1 else ((splits, rows, outputs), torch.float32)
    out = torch.empty(shape, dtype=dtype, device=x.device)
    # Two programs of gates share a multiprocessor, so that all of a model's have begun before the first has ended.
    spare = SHARED_MEMORY // (1 + gated) - (width * 64 * x.element_size() if splits == 1 else 0)
    step_bytes = (width + block) * COLUMNS.value * x.element_size()
    stages = min(spare // step_bytes, MOST_STAGES, inputs // splits // COLUMNS.value)
    multiply_rows[(outputs // 64, splits)](
        *read, bias, out, rows, outputs, inputs // splits,
        ROWS=width, BLOCK=block, GELU=activation == "gelu_pytorch_tanh",
        STAGES=stages, AHEAD=min(stages, AHEAD) if gated else stages,
        num_warps=4, maxnreg=128 if gated else None, launch_pdl=True,
    )  # fmt: skip
    return out


def _splits(weight: torch.Tensor) -> int:
    """In how many parts a product shares its inputs out, so that most of the multiprocessors have work."""
    outputs, inputs = weight.shape
    steps, splits = inputs // COLUMNS.value, 1
    while outputs // 64 * splits < multiprocessors(weight.device) * 2 // 3 and steps % (16 * splits) == 0:
        splits *= 2
    return splits


@gluon.jit(do_not_specialize=["rows"])
def multiply_rows(
    x, matrix, bias, out, rows, outputs, inputs,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, GELU: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Multiply all rows with 64 rows of a matrix, or 64 of gates and 64 of values: grid (outputs / 64, splits)."""
    gl.inline_asm_elementwise(  # the next kernel may start as soon as all programs of this one have
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    factors = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, COLUMNS], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK, COLUMNS], matrix.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    ring = (factors, weights, full, free)
    gl.warp_specialize(
        [
            (_multiply, (ring, bias, out, rows, outputs, inputs, ROWS, BLOCK, GELU, STAGES)),
            (_load, (ring, x, matrix, outputs, inputs, ROWS, BLOCK, STAGES, AHEAD)),
        ],
        [1], [40],
    )  # fmt: skip


@gluon.jit
def _load(
    ring, x, matrix, outputs, inputs,
    ROWS: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Fetch the matrix, and the rows once the kernels before have written them."""
    factors, weights, full, free = ring
    start = gl.program_id(1) * inputs
    for stage in gl.static_range(AHEAD):
        column = start + stage * COLUMNS
        _load_weights(weights.index(stage), full.index(stage), matrix, column, outputs, ROWS, BLOCK)
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    for stage in gl.static_range(STAGES):
        column = start + stage * COLUMNS
        if stage >= AHEAD:
            _load_weights(weights.index(stage), full.index(stage), matrix, column, outputs, ROWS, BLOCK)
        _fetch(x, [0, column], full.index(stage), factors.index(stage))
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for column in range(start + STAGES * COLUMNS, start + inputs, COLUMNS):
        mbarrier.wait(free.index(stage), phase)
        _load_weights(weights.index(stage), full.index(stage), matrix, column, outputs, ROWS, BLOCK)
        _fetch(x, [0, column], full.index(stage), factors.index(stage))
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _load_weights(weights, full, matrix, column, outputs, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """Fetch a step's columns of a block of the matrix; rows will come to the same barrier."""
    mbarrier.expect(full, (ROWS + BLOCK) * COLUMNS * 2)
    for part in gl.static_range(BLOCK // 64):
        _fetch(matrix, [part * outputs + gl.program_id(0) * 64, column], full, weights.slice(part * 64, 64))


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """Go on to the next place in the ring, and to the other phase at its end."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), phase ^ last.to(gl.int32)


@gluon.jit
def _multiply(
    ring, bias, out, rows, outputs, inputs, ROWS: gl.constexpr, BLOCK: gl.constexpr, GELU: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply what has been fetched, and write the products."""
    factors, weights, full, free = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    acc = gl.zeros([BLOCK, ROWS], gl.float32, layout)
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for _ in range(inputs // COLUMNS):
        mbarrier.wait(full.index(stage), phase)
        acc = warpgroup_mma(weights.index(stage), factors.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = _next(stage, phase, STAGES)
    first = gl.program_id(0) * 64
    if bias is not None:
        number = gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
        added = gl.load(bias + first + number // 64 * outputs + number % 64).to(gl.float32)
        acc += gl.expand_dims(gl.where(gl.program_id(1) == 0, added, 0.0), 1)
    element: gl.constexpr = factors.dtype
    if BLOCK == 128:  # rounded where a product of its own would be
        rounded = gl.reshape(acc.to(element).to(gl.float32), [2, 64, ROWS])
        gate, up = gl.split(gl.permute(rounded, (1, 2, 0)))
        slope = gate
        if GELU:
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        acc = (gate / (1.0 + gl.exp(-slope))).to(element).to(gl.float32) * up
    # In float32 what a warp holds fills whole sectors of 32 bytes; in 16 bits it is laid out anew for that.
    wide: gl.constexpr = out.dtype.element_ty == gl.float32
    lanes: gl.constexpr = acc.type.layout if wide else gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    found = gl.convert_layout(acc.to(out.dtype.element_ty), lanes)
    output = gl.expand_dims(first + gl.arange(0, 64, gl.SliceLayout(1, lanes)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(0, lanes)), 0)
    place = (gl.program_id(1) * rows + row).to(gl.int64) * outputs + output
    gl.store(out + place, found, mask=row < rows)

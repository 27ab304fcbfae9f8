"""Compile the Triton kernels for sm_90 on any machine and list registers, spills, shared memory and instructions.

    python benchmarks/compile_kernels.py [--dtype fp16|bf16|fp32]

Needs no GPU: Triton's wheels carry the assembler. Exits with 1 if a kernel spills registers to the stack.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from treewise.attention import kernels, score_kernels
from treewise.ops import kernels as op_kernels

POINTERS = {
    "items": "*i32",
    "row_order": "*i32",
    "queries": "*i32",
    "row_position": "*i32",
    "kv_slots": "*i32",
    "kv_readers": "*i64",
    "kv_position": "*i32",
    "indptr": "*i32",
    "entries": "*i32",
    "slots": "*i64",
    "q_positions": "*i64",
    "k_positions": "*i64",
    "masks": "*i64",
    "lse": "*fp32",
    "part_lse": "*fp32",
    "k_scale": "*fp32",
    "v_scale": "*fp32",
    "scale_log2": "fp32",
    "cap_log2": "fp32",
    "largest": "fp32",
    "eps": "fp32",
}
SHOWN = (
    "INPUTS",
    "SIZE",
    "BLOCK",
    "HALF",
    "OFFSET",
    "GELU",
    "LIMITED",
    "GROUP",
    "DIM",
    "PACKED",
    "TOKENS",
    "QUERIES",
    "REDUCE",
    "RUN",
    "MASK",
    "WINDOW",
    "CAPPED",
    "SPLIT",
)
ELEMENTS = (
    *("q", "k", "v", "out", "k_new", "v_new"),
    *("x", "residual", "weight", "normed", "total", "gate_up", "stacked", "cos", "sin", "q_norm", "k_norm"),
)


def compile_kernel(
    kernel: Any, constants: dict[str, Any], dtype: str, warps: int, registers: int | None = None, **types: str
) -> bool:
    """Compile one kernel, print a line about it, and tell whether it spills."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else "i32" for name in names}
    signature |= {name: kind for name, kind in POINTERS.items() if name in names}
    signature |= {name: f"*{dtype}" for name in ELEMENTS if name in names} | types
    # As a launch specialises them: pointers are aligned, strides multiples of 16 elements.
    aligned = [
        name for name in names if signature[name][0] == "*" or name.endswith(("_row", "_head", "_slot", "_layer"))
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    options = {"num_warps": warps, "num_stages": 3, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not os.access(tool, os.X_OK):
        tool.chmod(0o755)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    registers, stack = (int(number) for number in found.groups()) if found else (-1, -1)
    ptx = compiled.asm["ptx"]
    shown = {name: constants[name] for name in SHOWN if name in constants}
    print(
        f"{kernel.__name__:15} {dtype} {shown} warps {warps}: registers {registers} stack {stack} "
        f"shared {compiled.metadata.shared} wgmma {ptx.count('wgmma.mma_async')} "
        f"mma {len(re.findall('mma.sync', ptx))} cp.async {ptx.count('cp.async.c')}",
        flush=True,
    )
    return stack > 0


def compile_scores(dtype: str) -> bool:
    """Compile the column sums: many queries, few, one; every size of a head, 8-bit keys, a soft cap."""
    spills = False
    for dim, group, queries, pool, changes in (
        (128, 4, 64, dtype, {}),
        (128, 4, 64, dtype, {"REDUCE": "max"}),
        (128, 4, 64, dtype, {"slots": None}),
        (128, 4, 64, "fp8e4nv", {}),
        (128, 4, 16, dtype, {}),
        (128, 4, 1, dtype, {"num_queries": 1}),
        (64, 3, 64, dtype, {}),
        (80, 1, 64, dtype, {}),
        (96, 8, 64, dtype, {}),
        (256, 4, 64, dtype, {"CAPPED": True}),
    ):
        constants = {"KV_HEADS": 8, "GROUP": group, "DIM": dim, "CAPPED": False, "REDUCE": "mean"}
        constants |= {"PRECISION": "ieee" if dtype == "fp32" else "tf32"}
        constants |= score_kernels.tiles(dim, 4 if dtype == "fp32" else 2, queries) | changes
        constants |= {"k_scale": None} if pool == dtype else {}
        spills |= compile_kernel(score_kernels.sum_of_queries, constants, dtype, 4, k=f"*{pool}", out="*fp32")
    return spills


def compile_ops(dtype: str) -> bool:
    """Compile the element-wise kernels for rows of common models."""
    spills = False
    for size, block, offset, residual in (
        (4096, 4096, False, True),
        (8192, 8192, False, True),
        (3584, 4096, True, False),
    ):
        constants = {"SIZE": size, "BLOCK": block, "PARTS": 1, "OFFSET": offset, "OVERLAP": True}
        constants |= {} if residual else {"residual": None}
        spills |= compile_kernel(op_kernels.norm_rows, constants, dtype, min(16, block // 256))
    for size, gelu in ((14336, False), (9216, True)):
        constants = {"SIZE": size, "BLOCK": 1024, "GELU": gelu, "OVERLAP": True}
        spills |= compile_kernel(op_kernels.gate_rows, constants, dtype, 4)
    # Heads, KV heads, half of a head, heads a program, whether they are normalised, type of the pool.
    for heads, kv_heads, half, block, norms, pool in (
        (32, 8, 64, 16, False, dtype),
        (32, 8, 64, 16, False, "fp8e4nv"),
        (32, 8, 64, 16, True, dtype),
        (8, 4, 128, 8, True, dtype),
        (9, 3, 32, 16, False, dtype),
    ):
        constants = {"HEADS": heads, "KV_HEADS": kv_heads, "HALF": half, "HALF_PAD": half, "BLOCK": block}
        constants |= {"OFFSET": half == 128, "LIMITED": pool != dtype, "OVERLAP": True}
        constants |= {} if norms else {"q_norm": None, "k_norm": None}
        constants |= {} if pool != dtype else {"k_scale": None, "v_scale": None}
        spills |= compile_kernel(op_kernels.rotate_heads, constants, dtype, 4, k=f"*{pool}", v=f"*{pool}")
    return spills


def main() -> None:
    """Compile every kernel in the shapes that matter."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="fp16", choices=("fp16", "bf16", "fp32"))
    dtype = parser.parse_args().dtype
    print(f"triton {triton.__version__}")
    spills = False
    parts = "*fp16" if dtype == "fp16" else "*fp32"
    for dim, group in ((128, 4), (64, 3), (256, 4)):
        large = dim * (4 if dtype == "fp32" else 2) > 256
        tile = {"KV_HEADS": 8, "GROUP": group, "DIM": dim, "DIM_PAD": dim, "ORDERED": True}
        tile |= {"SCALED": False, "CAPPED": dim == 256, "RUN": 1}
        tile |= {"OVERLAP": True, "PRECISION": "ieee" if dtype == "fp32" else "tf32", "STAGES": 2 if large else 3}
        # Rows, kind of mask, whether whole steps run without it, key tokens a step, warps, registers.
        shapes = [(64, 0, True, 64, 4, None), (64, 1, True, 64, 4, None), (128, 0, True, 64, 8, None)]
        shapes += [(128, 1, True, 64, 8, None)]
        shapes += [(16, 0, False, 64, 4, None), (16, 1, False, 64, 4, None), (16, 3, False, 64, 4, None)]
        if not large:  # as `_launches` chooses them for short items and for narrow beside wide ones
            shapes += [(64, mask, split, 32, 4, 168) for mask in (0, 1, 2) for split in (False, True)]
            shapes += [(128, 0, False, 64, 8, 176), (128, 1, False, 64, 8, 176), (16, 1, False, 32, 2, 160)]
        if dim == 128:
            shapes += [(64, 4, False, 64, 8, None)]
        for packed, mask, split, tokens, warps, registers in shapes:
            kernel = kernels.attend_alone if mask == 4 else kernels.attend_items
            constants = tile | {"PACKED": packed, "MASK": mask, "WINDOW": dim == 256, "SPLIT": 6 * split}
            constants["TOKENS"] = min(tokens, 32) if large else tokens
            masks = {"masks": "*u8"} if mask == 4 else {}
            warps = 8 if dim > 128 else warps
            spills |= compile_kernel(kernel, constants, dtype, warps, registers, parts=parts, **masks)
        if not large:
            for run, pool in ((64, dtype), (1, "fp8e4nv"), (16, "fp8e4nv")):
                constants = tile | {"PACKED": 64, "TOKENS": 64, "MASK": 1, "WINDOW": False, "SPLIT": 6, "RUN": run}
                constants["SCALED"] = pool != dtype
                pools = {"k": f"*{pool}", "v": f"*{pool}"}
                spills |= compile_kernel(kernels.attend_items, constants, dtype, 4, parts=parts, **pools)
    merge = {"HEADS": 32, "DIM": 128, "DIM_PAD": 128, "BLOCK": 4, "ENTRIES": 4, "OVERLAP": True}
    spills |= compile_kernel(kernels.reduce_entries, merge, dtype, 1, parts=parts)
    store = {"DIM": 128, "DIM_PAD": 128, "HEADS": 8, "HEADS_PAD": 8, "SCALED": False, "LIMITED": False}
    spills |= compile_kernel(kernels.store_rows, store, dtype, 4)
    spills |= compile_scores(dtype)
    spills |= compile_ops(dtype)
    raise SystemExit(spills)


if __name__ == "__main__":
    main()

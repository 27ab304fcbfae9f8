"""How many tokens the pool of keys and values may hold: what memory is left beside weights and a step's own needs."""

from __future__ import annotations

import torch

from treewise.models import CausalLM
from treewise.ops import Heads
from treewise.results import format_bytes

CPU_POOL_BYTES = 2 << 30
"""Of a pool on a CPU, whose memory is everybody's."""
PARTIALS = 4
"""Partial results of attention that a row is expected to have; more come out of what the memory share leaves free."""


def default_slots(
    model: CausalLM,
    kv_dtype: torch.dtype,
    page_size: int,
    max_num_rows: int,
    gpu_memory_utilization: float,
    bytes_beside: int = 0,
) -> int:
    """Return the slots that fit, a multiple of the page size.

    On a GPU a step of `max_num_rows` rows is computed once, without keys and values, to see what it takes.

    Parameters
    ----------
    model : CausalLM
        With its weights in place.
    kv_dtype : torch.dtype
        Element type of keys and values.
    page_size, max_num_rows : int
    gpu_memory_utilization : float
        Share of the GPU's memory that weights, steps and pool may take together.
    bytes_beside : int
        What else lies under each slot.

    Raises
    ------
    ValueError
        If the share is not above 0 and at most 1, or leaves no room for a single page.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization}; it must be above 0 and at most 1")
    per_token = bytes_per_token(model, kv_dtype) + bytes_beside
    if model.device.type != "cuda":
        return max(CPU_POOL_BYTES // per_token // page_size, 2) * page_size
    step = step_bytes(model, max_num_rows)
    free, total = torch.cuda.mem_get_info(model.device)
    room = int(total * gpu_memory_utilization) - (total - free) - step
    pages = room // (per_token * page_size)
    if pages < 2:
        raise ValueError(
            f"gpu_memory_utilization: {gpu_memory_utilization} of {format_bytes(total)} leaves "
            f"{format_bytes(max(room, 0))} for keys and values beside {format_bytes(total - free)} in use and "
            f"{format_bytes(step)} for a step of max_num_rows={max_num_rows}; "
            f"a page of {page_size} tokens takes {format_bytes(per_token * page_size)}"
        )
    return pages * page_size


def bytes_per_token(model: CausalLM, kv_dtype: torch.dtype) -> int:
    """Return what keys and values of a token take over all layers."""
    config = model.config
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_dtype.itemsize


@torch.inference_mode()
def step_bytes(model: CausalLM, num_rows: int) -> int:
    """Return the most memory that steps of so many rows take beside weights, keys and values.

    Captured graphs keep memory of their own up to the output head, which all of them share. What each keeps beside
    that, some megabytes, comes out of what the memory share leaves free.
    """
    config, device = model.config, model.device
    rows = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def attend(layer: int, heads: Heads) -> torch.Tensor:
        return heads.stacked[:, : config.num_heads].contiguous()

    two = rows.new_zeros(2)
    model.logits(model(two, two, attend))  # the libraries' workspaces, which stay, are no part of a step
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    hidden = model(rows, rows, attend)
    captured = torch.cuda.max_memory_allocated(device) - before
    logits = model.logits(hidden)
    torch.log_softmax(logits.float(), dim=-1)  # as much as sampling takes at most
    peak = torch.cuda.max_memory_allocated(device) - before
    del hidden, logits
    torch.cuda.empty_cache()
    partials = PARTIALS * num_rows * config.num_heads * (config.head_dim + 1) * 4
    return int(peak + captured + 2 * partials)

"""What plans have to know of the device that they are for."""

from __future__ import annotations

import functools
from importlib import metadata

import torch


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many a GPU has; without one, those of an H100 or H200."""
    if not torch.cuda.is_available():
        return 132
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU, (0, 0) of what is none. Kernels launched ahead need 9.0."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Return what a kernel is launched with where it may start before the one in front of it has ended."""
    early = capability(device) >= (9, 0)
    return {"OVERLAP": early, "launch_pdl": early}


@functools.cache
def default_backend(device: torch.device) -> str:
    """Name the backend that runs plans where none is asked for."""
    if device.type != "cuda":
        return "cpu"
    is_hopper = torch.cuda.is_available() and capability(device) == (9, 0)
    return "hopper" if is_hopper and _has_gluon() else "triton"


def _has_gluon() -> bool:
    """Whether Triton is new enough for kernels in Gluon."""
    try:
        return tuple(int(number) for number in metadata.version("triton").split(".")[:2]) >= (3, 6)
    except metadata.PackageNotFoundError:
        return False

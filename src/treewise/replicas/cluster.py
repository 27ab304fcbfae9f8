"""The Ray cluster that replicas run on: found, or started on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

OBJECT_STORE_BYTES = 128 << 20
"""What Ray may keep in shared memory, where it is started here: only programs and their results go through it."""


def import_ray() -> ModuleType:
    """Return Ray, if it and what else replicas need is there.

    Raises
    ------
    ValueError
        If it is not; the message says how to get it.
    """
    try:
        import aiohttp  # noqa: F401
        import cloudpickle  # noqa: F401
        import ray
    except ImportError as error:
        raise ValueError(f"data_parallel_size: replicas need Ray; pip install 'treewise[ray]' ({error})") from None
    module: ModuleType = ray
    return module


@contextmanager
def connected(address: str | None = None, cpus: int = 1) -> Iterator[None]:
    """Be connected to a Ray cluster within this; nothing happens where this process is already.

    NOTE: to be entered from a thread that outlives it, the main one best: what Ray starts ends with that thread.

    Parameters
    ----------
    address : str, optional
        Of a cluster; that of the environment variable RAY_ADDRESS by default. Without any, one is started on this
        machine, for this process alone, and ends with it.
    cpus : int
        Processor cores that a cluster which is started has at least, whether the machine has so many or not.

    Raises
    ------
    ValueError
        If there is no Ray, or no cluster at that address.
    """
    ray = import_ray()
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    address = address or os.environ.get("RAY_ADDRESS")
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray would tell its makers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        options |= {"num_cpus": max(cpus, cores), "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"include_dashboard": False}
    try:
        ray.init(address or "local", **options)
    except (ConnectionError, RuntimeError) as error:
        raise ValueError(f"ray_address: no Ray cluster at {address or 'this machine'}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()

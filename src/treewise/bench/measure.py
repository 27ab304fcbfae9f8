"""Timing, the machine it ran on, and the last line that every benchmark prints."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from treewise.results import json_safe


def progress() -> Progress:
    """Make a progress bar on standard error, invisible where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), "+", TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def wall_time(function: Callable[[], object], device: torch.device) -> float:
    """Time one call by the clock on the wall, and what it starts on the device, in seconds."""
    start = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def time_calls(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Time a function that does the same work in each call.

    On a CUDA device the function is captured in a graph, and each timed replay starts with a cold L2 cache.

    Parameters
    ----------
    function : callable
        What to time. It is called twice before any timing.
    device : torch.device
        Where it runs.
    repeats : int
        Timed calls.

    Returns
    -------
    list of float
        Seconds of each call.
    """
    if device.type != "cuda":
        function()
        function()
        return [wall_time(function, device) for _ in range(repeats)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    cold = torch.empty(4 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        cold.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e-3 for start, end in events]


def copy_bandwidth(device: torch.device) -> float:
    """Measure how many bytes a second a plain copy moves, reads and writes together."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**26, device=device)
    target = torch.empty_like(source)
    # In a CUDA graph `copy_` would become a copy engine's job, which is slower than what kernels can reach.
    return 2 * source.nbytes / statistics.median(time_calls(lambda: torch.neg(source, out=target), device, 10))


def describe_machine(device: torch.device) -> dict[str, object]:
    """Say what a result depends on: device, threads, versions, commit."""
    versions = {"python": platform.python_version()}
    for package in ("treewise", "torch", "triton", "transformers", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    threads = torch.get_num_threads()
    return {"device": name, "cores": os.cpu_count(), "threads": threads, "versions": versions, "commit": commit()}


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that were in use, on the device or, on a CPU, by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def check_device(name: str) -> torch.device:
    """Return the device of that name.

    Raises
    ------
    ValueError
        If it is not cpu or cuda, or there is no such device.
    """
    if name not in ("cpu", "cuda"):
        raise ValueError(f"device: {name!r} is not one of cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: this machine has no CUDA device, or torch is a CPU build; use cpu")
    return torch.device(name)


def report(title: str, rows: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> None:
    """Print the rows as a table on standard error, and the result as one JSON line on standard output."""
    Console(stderr=True, width=None if sys.stderr.isatty() else 140).print(make_table(title, rows))
    print(json.dumps(json_safe(dict(result)), allow_nan=False), flush=True)


def make_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay rows out as a table, a column for each key of the first; columns of words to the left."""
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        words = isinstance(rows[0][column], str)
        table.add_column(column, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def processor() -> str:
    """Return the name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def commit() -> str | None:
    """Find the commit of the checkout that this file lies in, marked where it has changes; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None

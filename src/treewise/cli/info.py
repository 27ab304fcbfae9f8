"""The verbs `models` and `env`."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from treewise.bench.measure import make_table
from treewise.planning import Demand, plan
from treewise.results import format_bytes

PACKAGES = (
    *("torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "huggingface-hub", "llguidance"),
    *("fastapi", "uvicorn", "prometheus-client", "opentelemetry-sdk"),
)
VARIABLES = (
    *(
        "TREEWISE_",
        "CUDA_",
        "NVIDIA_",
        "NCCL_",
        "TORCH",
        "PYTORCH_",
        "TRITON_",
        "OMP_",
        "MKL_",
        "KMP_",
        "GOMP_",
        "MALLOC_",
    ),
    *(
        "HF_",
        "HUGGINGFACE_",
        "TRANSFORMERS_",
        "TOKENIZERS_",
        "XDG_CACHE_HOME",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "OTEL_",
    ),
)
"""Beginnings of the names of environment variables that change what treewise or its libraries do."""
SECRET_WORDS = {"TOKEN", "KEY", "KEYS", "SECRET", "PASSWORD", "PASS", "CREDENTIAL", "CREDENTIALS", "AUTH", "HEADERS"}
"""What is in names of variables whose values nobody should see."""


def env(
    *,
    json_: Annotated[bool, Parameter("--json", negative=())] = False,
    demand: Annotated[Demand | None, Parameter("*", group="A plan")] = None,
) -> None:
    """Print versions, devices, settings and folders, for bug reports; no secrets. Or plan for a model on some GPUs.

    A plan (--plan MODEL) has a row for each way to use the GPUs: so many ranks that share the model out, and so many
    replicas of that. It reckons with sizes and rates alone, and says where each number comes from.

    Parameters
    ----------
    json_
        Print JSON.
    """
    demand = demand or Demand()
    demand.check()
    if demand.plan is not None:
        _print_plan(demand, json_)
        return
    facts = describe_environment()
    if json_:
        print(json.dumps(facts, indent=1))
        return
    lines = list(_lines(facts))
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        print(f"{name:{width}}  {value}")


def _print_plan(demand: Demand, as_json: bool) -> None:
    found = plan(demand)
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    title = (
        f"{demand.plan} in {demand.dtype} on {demand.gpus} x {demand.gpu}; a request: {demand.prompt_tokens:,} tokens, "
        f"then {demand.branches} branches of {demand.new_tokens:,}"
    )
    console.print(make_table(title, list(found.rows())))
    for what, origin in found.origins.items():
        console.print(f"{what}: {origin}", highlight=False)


def describe_environment() -> dict[str, Any]:
    """Tell what behaviour and speed depend on, as JSON can hold it; sizes are bytes."""
    import torch

    from treewise import __version__
    from treewise.bench.measure import commit, processor
    from treewise.config import cache_folder

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "treewise": __version__,
        "commit": commit(),
        "python": f"{platform.python_version()} ({sys.executable})",
        "os": platform.platform(),
        "packages": {package: _version(package) for package in PACKAGES},
        "cpu": {
            "model": processor(),
            "cores": os.cpu_count(),
            "usable_cores": usable,
            "threads": torch.get_num_threads(),
            "instructions": torch.backends.cpu.get_cpu_capability(),
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None,
        },
        "cuda": {
            "of_torch": torch.version.cuda,
            "driver": _driver(),
            "devices": [
                {
                    "name": device.name,
                    "capability": f"{device.major}.{device.minor}",
                    "memory": device.total_memory,
                    "free": torch.cuda.mem_get_info(index)[0],
                }
                for index, device in enumerate(devices)
            ],
        },
        "environment": {
            name: _shown(name, os.environ[name]) for name in sorted(os.environ) if name.startswith(VARIABLES)
        },
        "cache": {"folder": str(cache_folder()), "models": {name: size for name, size, _ in _cached()}},
    }


def _lines(facts: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Yield name and value of each fact as people read them."""
    for name, value in facts.items():
        if isinstance(value, list):
            value = dict(enumerate(value))
        if isinstance(value, Mapping):
            yield from _lines(value, f"{above}{name} ")
        elif isinstance(value, int) and (name in ("memory", "free") or above == "cache models "):
            yield f"{above}{name}", format_bytes(value)
        else:
            yield f"{above}{name}", "none" if value is None else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Ask for the version of the GPU's driver."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return said[0] if said else None


def _shown(name: str, value: str) -> str:
    """Return a variable's value, or what may be seen of it."""
    if SECRET_WORDS.intersection(name.upper().split("_")):
        return "(set, not shown)"
    return re.sub(r"(?<=://)[^/@\s]*@", "…@", value)  # user and password of a URL


def models() -> None:
    """List the built-in models and the converted copies in the cache."""
    from treewise.config import cache_folder
    from treewise.models.builtin import BUILTIN_MODELS

    print("Built-in models, fetched when first used:")
    for name, model in BUILTIN_MODELS.items():
        print(f"  {name:16} {format_bytes(model.size):>8}  {model.summary}")
    print(f"In the cache, {cache_folder()}:")
    for name, size, what in _cached():
        print(f"  {name:32} {format_bytes(size):>8}  {what}")
    if not _cached():
        print("  nothing yet")


def _cached() -> list[tuple[str, int, str]]:
    """Return name, bytes and kind of each model in the cache."""
    from treewise.config import cache_folder

    found = []
    for file in sorted(path for path in (cache_folder() / "files").rglob("*") if path.is_file()):
        found.append((file.name, file.stat().st_size, "as fetched"))
    for folder in sorted(path.parent for path in (cache_folder() / "converted").glob("*/config.json")):
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        what = f"converted: {', '.join(config['architectures'])}, {config['num_hidden_layers']} layers"
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        found.append((folder.name, size, what))
    return found

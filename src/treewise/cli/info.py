"""The verbs `models` and `env`."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from treewise.results import format_bytes

PACKAGES = ("treewise", "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "gguf")


def env() -> None:
    """Print versions, devices and folders, for bug reports."""
    import torch

    from treewise.models.cache import cache_folder

    lines = {"python": f"{platform.python_version()} ({sys.executable})", "platform": platform.platform()}
    for package in PACKAGES:
        try:
            lines[package] = version(package)
        except PackageNotFoundError:
            lines[package] = "not installed"
    lines["cpu"] = (
        f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    lines["cuda"] = torch.version.cuda or "not in this build of torch"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines[f"cuda:{index}"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    lines["cache"] = str(cache_folder())
    width = max(map(len, lines))
    for name, value in lines.items():
        print(f"{name:{width}}  {value}")


def models() -> None:
    """List the built-in models and the converted copies in the cache."""
    from treewise.models.builtin import BUILTIN_MODELS
    from treewise.models.cache import cache_folder

    print("Built-in models, fetched when first used:")
    for name, model in BUILTIN_MODELS.items():
        print(f"  {name:16} {format_bytes(model.size):>8}  {model.summary}")
    files = sorted((cache_folder() / "files").glob("*"))
    folders = sorted(path.parent for path in (cache_folder() / "converted").glob("*/config.json"))
    print(f"In the cache, {cache_folder()}:")
    for path in [*files, *folders]:
        size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file())
        print(f"  {path.relative_to(cache_folder())!s:60} {format_bytes(size):>8}")
    if not files and not folders:
        print("  nothing yet")

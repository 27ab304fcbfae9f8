"""The verbs `models` and `env`."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from treewise.results import format_bytes

PACKAGES = ("treewise", "torch", "triton", "numpy", "transformers", "tokenizers", "safetensors", "gguf")


def env() -> None:
    """Print versions, devices and folders, for bug reports."""
    import torch

    from treewise.config import cache_folder

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
    from treewise.config import cache_folder
    from treewise.models.builtin import BUILTIN_MODELS

    print("Built-in models, fetched when first used:")
    for name, model in BUILTIN_MODELS.items():
        print(f"  {name:16} {format_bytes(model.size):>8}  {model.summary}")
    files = sorted(path for path in (cache_folder() / "files").rglob("*") if path.is_file())
    folders = sorted(path.parent for path in (cache_folder() / "converted").glob("*/config.json"))
    print(f"In the cache, {cache_folder()}:")
    for file in files:
        print(f"  {file.name:32} {format_bytes(file.stat().st_size):>8}  as fetched")
    for folder in folders:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        what = f"converted: {', '.join(config['architectures'])}, {config['num_hidden_layers']} layers"
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"  {folder.name:32} {format_bytes(size):>8}  {what}")
    if not files and not folders:
        print("  nothing yet")

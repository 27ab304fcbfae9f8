"""Policies by the names of those who described them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, Mapping[str, Any]] = {
    "full": {"scorer": "full", "allocator": "full"},
    "novita": {"scorer": "snapkv", "first_full": 3, "every": 64},
    "pyramidkv": {"scorer": "snapkv", "allocator": "pyramid"},
    "snapkv": {"scorer": "snapkv"},
    "adakv": {"scorer": "snapkv", "allocator": "ada"},
}
"""Settings of `KVSparsity` that differ from its defaults."""

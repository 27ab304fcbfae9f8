"""Policies by the names of those who described them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: dict[str, Mapping[str, Any]] = {
    "full": {"scorer": "full", "allocator": "full"},
    "random": {"scorer": "random"},
    "streaming": {"scorer": "streaming", "every": 64},
    "novita": {"scorer": "snapkv", "first_full": 3, "every": 256},
    "snapkv": {"scorer": "snapkv"},
    "pyramidkv": {"scorer": "snapkv", "allocator": "pyramid"},
    "adakv": {"scorer": "snapkv", "allocator": "ada"},
    "induction": {"scorer": "induction", "window": 16},
    "calibrated": {"scorer": "induction", "allocator": "calibrated", "window": 16},
    "h2o": {"scorer": "h2o"},
    "tova": {"scorer": "tova", "every": 64},
    "keydiff": {"scorer": "keydiff"},
    "knorm": {"scorer": "knorm"},
    "expected_attention": {"scorer": "expected_attention"},
    "keyformer": {"scorer": "keyformer"},
    "pyramidinfer": {"scorer": "pyramidinfer", "allocator": "pyramid"},
    "rkv": {"scorer": "rkv", "window": 8, "every": 128},
}
"""Settings of `KVSparsity` that differ from its defaults."""

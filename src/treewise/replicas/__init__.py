"""Many engines behind one door: processes on one machine or many, through Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewise.replicas.mapping import Engines, Mapped, map_programs
    from treewise.replicas.outside import Replicas

# Imported on first use: a server listens before torch is loaded, and engines in this process need no Ray.
_HOMES = {
    "Engines": "treewise.replicas.mapping",
    "Mapped": "treewise.replicas.mapping",
    "Replicas": "treewise.replicas.outside",
    "map_programs": "treewise.replicas.mapping",
}

__all__ = ["Engines", "Mapped", "Replicas", "map_programs"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

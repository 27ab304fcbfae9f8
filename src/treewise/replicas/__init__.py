"""Many engines behind one door: processes on one machine or many, through Ray."""

from treewise.replicas.mapping import Engines, Mapped, map_programs

__all__ = ["Engines", "Mapped", "map_programs"]

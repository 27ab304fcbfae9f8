"""What a fleet of replicas may be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from treewise.config import check_integer, check_number
from treewise.replicas.routing import PrefixRouter, RoundRobin, Router

ROUTERS: dict[str, type[PrefixRouter] | type[RoundRobin]] = {"prefix": PrefixRouter, "round_robin": RoundRobin}
"""Ways to choose a replica by name."""


@dataclass(frozen=True)
class FleetOptions:
    """How many replicas of the model there are, where they run, and how requests are shared out.

    Parameters
    ----------
    data_parallel_size : int
        Replicas of the model, each with devices of its own, through Ray.
    ray_address : str
        Ray cluster to run replicas on, such as auto or ray-head:6379; that of RAY_ADDRESS if left out, else one is
        started on this machine and ended with the server.
    routing : str
        prefix: a request goes where most of its prompt is cached, unless that replica has too much to do. round_robin:
        to one replica after the other.
    max_attempts : int
        Replicas that a request may lose before it is given up.
    cpus_per_replica : int
        Processor cores that each replica is given; what there is, shared out, if left out, and on GPUs one a device.
    start_timeout : float
        Seconds that a replica may take to load its model.
    restart_timeout : float
        Seconds that requests get to finish on a replica that is restarted; then they go on elsewhere.

    Raises
    ------
    ValueError
        A value is out of range; the message names the field and what it accepts.
    """

    data_parallel_size: int = 1
    ray_address: str | None = None
    routing: Literal["prefix", "round_robin"] = "prefix"
    max_attempts: int = 5
    cpus_per_replica: int | None = None
    start_timeout: float = 1800.0
    restart_timeout: float = 60.0

    def __post_init__(self) -> None:
        for name in ("data_parallel_size", "max_attempts"):
            check_integer(name, getattr(self, name), 1)
        if self.cpus_per_replica is not None:
            check_integer("cpus_per_replica", self.cpus_per_replica, 1)
        check_number("start_timeout", self.start_timeout, 0, 1e9, open_low=True)
        check_number("restart_timeout", self.restart_timeout, 0, 1e9)
        if self.routing not in ROUTERS:
            raise ValueError(f"routing: {self.routing!r} is not one of {', '.join(ROUTERS)}")

    @property
    def are_wanted(self) -> bool:
        """Whether there are to be replicas at all, and not one engine in the process itself."""
        return self.data_parallel_size > 1 or self.ray_address is not None

    def router(self) -> Router:
        """Return a router of the kind that is asked for."""
        return ROUTERS[self.routing]()

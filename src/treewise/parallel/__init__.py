"""Tensor parallelism: one model over several devices, a process each.

Rank 0 runs programs, scheduler and planner as on one device. With every forward it sends the others one message, from
which each computes the same with its share of the weights and its own KV heads.
"""

from treewise.parallel.leader import LeadingRunner, everywhere, make_runner
from treewise.parallel.model import ParallelLM
from treewise.parallel.ranks import RankLost, load

__all__ = ["LeadingRunner", "ParallelLM", "RankLost", "everywhere", "load", "make_runner"]

"""Slots for nodes: paged and contiguous pools, refcounts, radix match and LRU, sparsity policies."""

from treewise.kv.contiguous import ContiguousPool
from treewise.kv.kept import Count, Kept, Stage, Thinning
from treewise.kv.manager import POOLS, CacheStatistics, KVManager, Preemption, make_pool
from treewise.kv.paged import PagedPool
from treewise.kv.pool import Copy, OutOfSlots, SlotPool, Slots
from treewise.kv.usage import KVUsage

__all__ = [
    "POOLS",
    "CacheStatistics",
    "ContiguousPool",
    "Copy",
    "Count",
    "KVManager",
    "KVUsage",
    "Kept",
    "OutOfSlots",
    "PagedPool",
    "Preemption",
    "SlotPool",
    "Slots",
    "Stage",
    "Thinning",
    "make_pool",
]

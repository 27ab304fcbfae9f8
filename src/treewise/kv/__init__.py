"""Slots for nodes: paged and contiguous pools, refcounts, radix match and LRU, sparsity policies."""

from treewise.kv.contiguous import ContiguousPool
from treewise.kv.manager import POOLS, KVManager, make_pool
from treewise.kv.paged import PagedPool
from treewise.kv.pool import Copy, OutOfSlots, SlotPool, Slots

__all__ = ["POOLS", "ContiguousPool", "Copy", "KVManager", "OutOfSlots", "PagedPool", "SlotPool", "Slots", "make_pool"]

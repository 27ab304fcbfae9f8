"""What keys and values take of memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVUsage:
    """What keys and values take, and what those of the same tokens would take if no layer had given up any.

    Attributes
    ----------
    slots : int
        In use, by the pool's own count.
    live_slots : int
        Of these, those on pages that live branches need. The others are cached prefixes, which make room when asked.
    live_tokens : int
        Tokens on the paths of live branches that a dense cache would have keys of, each once.
    bytes_per_slot : int
        Of the keys and values of a token, over all layers.
    bytes_beside : int
        Beside the pool: of queries that wait for keys to be scored, and of what the output head makes of the last
        tokens of prompts that were thinned out.

    Examples
    --------
    >>> KVUsage(slots=1136, live_slots=1120, live_tokens=4000, bytes_per_slot=1024, bytes_beside=40960).ratio
    0.29
    """

    slots: int
    live_slots: int
    live_tokens: int
    bytes_per_slot: int
    bytes_beside: int = 0

    @property
    def bytes_held(self) -> int:
        """Of all slots in use."""
        return self.slots * self.bytes_per_slot

    @property
    def live_bytes(self) -> int:
        """What live branches need, `bytes_beside` included."""
        return self.live_slots * self.bytes_per_slot + self.bytes_beside

    @property
    def dense_bytes(self) -> int:
        """What the tokens of live branches would take if all of them had keys in all layers, page ends left out."""
        return self.live_tokens * self.bytes_per_slot

    @property
    def ratio(self) -> float:
        """`live_bytes` over `dense_bytes`; 1 where nothing is live. Unused ends of pages make it a little larger."""
        return self.live_bytes / self.dense_bytes if self.live_tokens else 1.0

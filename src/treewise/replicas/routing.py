"""Which of several replicas a request goes to: where the longest prefix of it is cached, if that is soonest."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from treewise.config import check_integer

BLOCK_TOKENS = 16
"""Prefixes are known by whole blocks of so many tokens."""

TOKEN_CHARACTERS = 4
"""Characters of a text that count as a token, where nobody has encoded it."""

AGAIN = 2
"""How much a token of a prompt that has to be computed counts beside one under way: it takes time now, and room in the
cache from then on."""

CAPACITY = 1 << 20
"""Tokens of prefixes that are remembered for a replica of which nothing else is known."""


@dataclass(frozen=True, eq=False)
class Route:
    """Where a request goes.

    Attributes
    ----------
    name : str
        The replica.
    matched : int
        Tokens at the prompt's beginning that it has been sent before and should still have.
    work : int
        Tokens that it has to compute: what is left of the prompt, and what is to be decoded.
    """

    name: str
    matched: int = 0
    work: int = 0
    blocks: tuple[int, ...] = field(default=(), repr=False)  # a hash for each block, and all before it


class Router(Protocol):
    """Knows replicas by name, and says which of them a request goes to.

    It is one thread's, or one event loop's.
    """

    @property
    def names(self) -> list[str]:
        """The replicas there are."""

    def add(self, name: str, capacity: int = CAPACITY) -> None:
        """Let a replica have requests from now on; its cache is empty, and holds so many tokens."""

    def remove(self, name: str) -> None:
        """Let a replica have no more requests, and forget it with all that it has open."""

    def route(
        self, prompt: str | Sequence[int], *, decode: int = 0, namespace: str = "", avoid: Collection[str] = ()
    ) -> Route:
        """Return where a request is to go; nothing is noted.

        Parameters
        ----------
        prompt : str or sequence of int
            Text or token ids; one does not match the other.
        decode : int
            Tokens that are expected to be decoded.
        namespace : str
            Only requests of one namespace share prefixes.
        avoid : collection of str
            Replicas that are taken only where there are no others.

        Raises
        ------
        LookupError
            If there is no replica.
        """

    def began(self, route: Route) -> None:
        """Note that a request has gone where it was to go."""

    def ended(self, route: Route) -> None:
        """Note that it has ended, however it did; nothing happens where its replica has been removed since."""


class PrefixRouter:
    """Sends a request where it costs least; see `Router`.

    That is the replica with the least ``work under way + AGAIN * tokens of the prompt that are not cached there``, both
    in tokens. A replica that has a long prefix wins over idle ones until what it has under way is twice of what it
    takes to compute the prefix anew; from then on the prefix is on two replicas, which share its requests. Of equal
    replicas the one that remembers least takes a request: prefixes spread.

    What replicas have in their caches is not asked, but guessed: the blocks of the prompts that went there, the most
    recently used ones up to the replica's capacity. A block is known by the hash of itself and all before it, as in
    paged prefix caches.

    Examples
    --------
    >>> router = PrefixRouter()
    >>> for name in ("a", "b"):
    ...     router.add(name)
    >>> def ask(prompt):
    ...     route = router.route(prompt)
    ...     router.began(route)
    ...     return route.name, route.matched
    >>> ask(range(100)), ask(range(1000, 1200)), ask([*range(100), 7])
    (('a', 0), ('b', 0), ('a', 96))
    """

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[int, None]] = {}  # blocks, the least recently used first
        self._capacities: dict[str, int] = {}  # in blocks
        self._loads: dict[str, int] = {}
        self._open: set[Route] = set()

    @property
    def names(self) -> list[str]:
        """See `Router.names`."""
        return list(self._known)

    def add(self, name: str, capacity: int = CAPACITY) -> None:
        """See `Router.add`.

        Raises
        ------
        ValueError
            If there is one of that name, or it holds nothing.
        """
        check_integer("capacity", capacity, 1)
        if name in self._known:
            raise ValueError(f"name: there is a replica {name!r} already")
        self._known[name] = OrderedDict()
        self._capacities[name] = capacity // BLOCK_TOKENS
        self._loads[name] = 0

    def remove(self, name: str) -> None:
        """See `Router.remove`."""
        for of_each in (self._known, self._capacities, self._loads):
            of_each.pop(name, None)
        self._open = {route for route in self._open if route.name != name}

    def load(self, name: str) -> int:
        """Return the tokens that a replica has to compute for what is open."""
        return self._loads[name]

    def remembered(self, name: str) -> int:
        """Return the tokens that a replica is taken to have cached."""
        return len(self._known[name]) * BLOCK_TOKENS

    def route(
        self, prompt: str | Sequence[int], *, decode: int = 0, namespace: str = "", avoid: Collection[str] = ()
    ) -> Route:
        """See `Router.route`."""
        tokens, blocks = _blocks(prompt, namespace)
        routes = []
        for name in _candidates(self._known, avoid):
            matched = self._match(name, blocks) * BLOCK_TOKENS
            routes.append(Route(name, matched, tokens - matched + decode, blocks))

        def cost(route: Route) -> tuple[int, int]:
            return self._loads[route.name] + AGAIN * (tokens - route.matched), len(self._known[route.name])

        return min(routes, key=cost)

    def began(self, route: Route) -> None:
        """See `Router.began`."""
        if (known := self._known.get(route.name)) is None:
            return
        self._open.add(route)
        self._loads[route.name] += route.work
        # The first block comes last, so that of no prefix an earlier block is forgotten before a later one.
        for block in reversed(route.blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._capacities[route.name]:
            known.popitem(last=False)

    def ended(self, route: Route) -> None:
        """See `Router.ended`."""
        if route in self._open:
            self._open.discard(route)
            self._loads[route.name] -= route.work

    @contextmanager
    def under_way(self, route: Route) -> Iterator[Route]:
        """Note a request's beginning and its end."""
        self.began(route)
        try:
            yield route
        finally:
            self.ended(route)

    def _match(self, name: str, blocks: Sequence[int]) -> int:
        """Return how many blocks at the beginning a replica has."""
        known = self._known[name]
        return bisect_right(blocks, False, key=lambda block: block not in known)


class RoundRobin:
    """Sends requests to one replica after the other, whatever they are; see `Router`."""

    def __init__(self) -> None:
        self._turns: OrderedDict[str, None] = OrderedDict()  # the next one first

    @property
    def names(self) -> list[str]:
        """See `Router.names`."""
        return sorted(self._turns)

    def add(self, name: str, capacity: int = CAPACITY) -> None:
        """See `Router.add`."""
        self._turns[name] = None

    def remove(self, name: str) -> None:
        """See `Router.remove`."""
        self._turns.pop(name, None)

    def route(
        self, prompt: str | Sequence[int], *, decode: int = 0, namespace: str = "", avoid: Collection[str] = ()
    ) -> Route:
        """See `Router.route`."""
        tokens, _ = _blocks(prompt, namespace)
        return Route(next(iter(_candidates(self._turns, avoid))), 0, tokens + decode)

    def began(self, route: Route) -> None:
        """See `Router.began`."""
        if route.name in self._turns:
            self._turns.move_to_end(route.name)

    def ended(self, route: Route) -> None:
        """See `Router.ended`."""


def _candidates(names: Collection[str], avoid: Collection[str]) -> Collection[str]:
    """Return the replicas that may be taken.

    Raises
    ------
    LookupError
    """
    if not names:
        raise LookupError("there is no replica")
    return [name for name in names if name not in avoid] or names


def _blocks(prompt: str | Sequence[int], namespace: str) -> tuple[int, tuple[int, ...]]:
    """Return how many tokens a prompt has, about, and the hash of each whole block with all before it."""
    is_text = isinstance(prompt, str)
    given, size = (prompt, BLOCK_TOKENS * TOKEN_CHARACTERS) if is_text else (tuple(prompt), BLOCK_TOKENS)
    blocks, seed = [], hash((is_text, namespace))
    for end in range(size, len(given) + 1, size):
        seed = hash((seed, given[end - size : end]))
        blocks.append(seed)
    return len(given) * BLOCK_TOKENS // size, tuple(blocks)

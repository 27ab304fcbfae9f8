"""Prompt lookup: what followed the longest known ending of a path elsewhere will follow it here."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from treewise.branch import BranchTree
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.paths import PathStates
from treewise.speculate.trees import EMPTY, TokenTree

MOST_COUNTED = 32
"""Endings of a text, the longest ones, that each of its tokens is counted for."""
MOST_FOLLOWERS = 6
"""Tokens that are looked at behind one ending."""
MOST_ENDINGS = 4
"""Endings, the longest ones, that have a say in what follows."""
TRUSTED = 8
"""Tokens of an ending from which on longer ones are not trusted more."""


class SuffixAutomaton:
    """All substrings of some texts, which may share beginnings; one more token takes constant time on average.

    A state stands for substrings that end at the same places. State 0 is the empty text, where every text begins. A
    text is known by the state in which it ends, so that a fork of it is a number, and so is what it was before its last
    tokens.

    Attributes
    ----------
    following : list of dict of int to int
        The state behind each state and token.
    link : list of int
        The state of the longest ending that also ends elsewhere; -1 for state 0.
    length : list of int
        How many tokens the longest text of each state has.
    count : list of int
        How often the texts of each state were seen, but for endings too short to be worth it.
    newest : list of int
        When they were seen last.

    Notes
    -----
    Blumer et al. (1985); over tries, Mohri, Moreno and Weinstein (2009).

    Examples
    --------
    >>> automaton = SuffixAutomaton()
    >>> end = automaton.extend(0, [1, 2, 3, 1, 2])
    >>> ending = automaton.link[end]  # [1, 2], which 3 has followed
    >>> automaton.length[ending], list(automaton.following[ending])
    (2, [3])
    """

    def __init__(self) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.newest = [0]
        self.clock = 0

    def __len__(self) -> int:
        return len(self.link)

    def extend(self, state: int, tokens: Iterable[int]) -> int:
        """Put tokens behind a text that ends in `state`; return the state in which it ends then."""
        for token in tokens:
            state = self.append(state, token)
        return state

    def append(self, last: int, token: int) -> int:
        """Put a token behind a text that ends in `last`; return the state in which it ends then."""
        following, link, length = self.following, self.link, self.length
        known = following[last].get(token)
        if known is not None:
            state = known if length[known] == length[last] + 1 else self._clone(last, token, known)
        else:
            state = self._add({}, 0, length[last] + 1)
            above = last
            while above >= 0 and token not in following[above]:
                following[above][token] = state
                above = link[above]
            if above >= 0:
                known = following[above][token]
                link[state] = known if length[known] == length[above] + 1 else self._clone(above, token, known)
        self._see(state)
        return state

    def _clone(self, above: int, token: int, known: int) -> int:
        """Tell the texts of `known` that come by way of `above` from the longer ones."""
        following, link = self.following, self.link
        clone = self._add(following[known].copy(), link[known], self.length[above] + 1)
        self.count[clone], self.newest[clone] = self.count[known], self.newest[known]
        while above >= 0 and following[above].get(token) == known:
            following[above][token] = clone
            above = link[above]
        link[known] = clone
        return clone

    def _add(self, following: dict[int, int], link: int, length: int) -> int:
        self.following.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(0)
        self.newest.append(0)
        return len(self.link) - 1

    def _see(self, state: int) -> None:
        self.clock += 1
        for _ in range(MOST_COUNTED):
            if state <= 0:
                return
            self.count[state] += 1
            self.newest[state] = self.clock
            state = self.link[state]

    def guess(self, state: int, size: int, depth: int) -> TokenTree:
        """Return up to `size` nodes of what may follow a text that ends in `state`, the likeliest first.

        The longest endings of the text that something has followed say what comes next, each with what is left of the
        probability; behind a guess, its own endings do. Short endings are trusted less than long ones.
        """
        tokens: list[int] = []
        parents: list[int] = []
        odds: list[float] = []
        # The open ones: how likely with all above, their order; token, parent, probability, state, depth.
        heap: list[tuple[float, int, int, int, float, int, int]] = []
        order = 0
        node, reach, level = -1, 1.0, 0
        while True:
            if level < depth:
                for token, below, own in self._followers(state):
                    order += 1
                    heapq.heappush(heap, (-reach * own, order, token, node, own, below, level + 1))
            if not heap or len(tokens) == size:
                break
            cost, _, token, above, own, state, level = heapq.heappop(heap)
            node, reach = len(tokens), -cost
            tokens.append(token)
            parents.append(above)
            odds.append(own)
        return TokenTree.of(tokens, parents, odds) if tokens else EMPTY

    def _followers(self, state: int) -> list[tuple[int, int, float]]:
        """Return tokens that may follow, each with the state behind it and its probability."""
        found: dict[int, tuple[int, int, float]] = {}
        left, endings = 1.0, 0
        every, length, link = self.following, self.length, self.link
        while state > 0 and endings < MOST_ENDINGS:
            if following := every[state]:
                endings += 1
                trust = length[state]
                trust = trust if trust < TRUSTED else TRUSTED
                if len(following) == 1:  # nearly always
                    [(token, below)] = following.items()
                    share = left * trust / (1 + trust)
                    if token not in found:
                        found[token] = token, below, share
                else:
                    count, newest = self.count, self.newest
                    best = heapq.nlargest(
                        MOST_FOLLOWERS, following.items(), key=lambda item: (count[item[1]], newest[item[1]])
                    )
                    total = sum([count[below] for _, below in best])
                    share = left * total * trust / (total * trust + len(following))
                    for token, below in best:
                        if token not in found:
                            found[token] = token, below, share * count[below] / total
                left -= share
            state = link[state]
        return list(found.values())


class NgramDrafter:
    """Looks up what followed the longest known ending of a path in its tree: the prompt, what its branches decoded.

    Parameters
    ----------
    shared : bool
        Look in what all requests of one namespace have read and decoded so far, not only in the request's own tree.
    capacity : int
        States of a shared store at which it is begun anew.
    """

    wants_hidden = False

    def __init__(self, shared: bool = False, capacity: int = 1 << 21) -> None:
        self.shared = shared
        self.capacity = capacity
        self._stores: dict[str, SuffixAutomaton] = {}
        self._known: WeakKeyDictionary[BranchTree, tuple[SuffixAutomaton, PathStates]] = WeakKeyDictionary()

    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        guesses = []
        for stem in stems:
            tree = stem.branch.tree
            if tree not in self._known:
                automaton = self._store(tree.namespace)
                self._known[tree] = automaton, PathStates(automaton.append)
            automaton, states = self._known[tree]
            guesses.append(automaton.guess(states.last(stem.branch), size, stem.room))
        return guesses

    def _store(self, namespace: str) -> SuffixAutomaton:
        if not self.shared:
            return SuffixAutomaton()
        if namespace not in self._stores or len(self._stores[namespace]) > self.capacity:
            self._stores[namespace] = SuffixAutomaton()
        return self._stores[namespace]

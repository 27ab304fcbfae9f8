"""Replicas that exist in numbers alone, behind a real router: which way of sharing requests out serves more of them."""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, islice
from math import ceil
from typing import Any

from treewise.bench.steps import percentiles
from treewise.replicas.routing import Route, Router

BLOCK_TOKENS = 64
"""Keys and values are cached by whole blocks of so many tokens, the largest pages that engines have."""

WARM = 0.3
"""Share of the requests that have ended before anything is counted: caches are empty at first."""


@dataclass(frozen=True)
class StepCosts:
    """What an engine's steps take, in seconds.

    Attributes
    ----------
    step : float
        Whatever is in it: the weights have to be read.
    row : float
        For each row that decodes.
    token : float
        For each token whose keys and values are read, once for all rows that see it.
    prompt_row : float
        For each row of a prompt.
    """

    step: float
    row: float
    token: float
    prompt_row: float

    def seconds(self, steps: float, rows: float, tokens: float, prompt_rows: float) -> float:
        """Return the seconds of some steps, with what is in all of them together."""
        return self.step * steps + self.row * rows + self.token * tokens + self.prompt_row * prompt_rows


@dataclass(frozen=True)
class Turn:
    """What is asked at a time.

    Attributes
    ----------
    tokens : tuple of range
        What the prompt has behind what was said before, as token ids.
    branches, new_tokens : int
        Branches that the prompt is decoded in, and tokens of each.
    pause : float
        Seconds between the end of the turn before and this one.
    """

    tokens: tuple[range, ...]
    branches: int = 1
    new_tokens: int = 128
    pause: float = 0.0


Session = Sequence[Turn]
"""Turns, each of which has all before it, and their answers, at its beginning."""


@dataclass(eq=False)
class Job:
    """A turn that is under way.

    Attributes
    ----------
    session, turn : int
    blocks : list of int
        Hash of each whole block of the prompt with all before it.
    prompt_tokens, branches, new_tokens : int
    kept : list of int
        Blocks that the next turn will find, behind those of the prompt.
    arrived, first, ended : float
        When it came, had its first token, and ended.
    matched : int
        Tokens of the prompt that were cached.
    """

    session: int
    turn: int
    blocks: list[int]
    prompt_tokens: int
    branches: int
    new_tokens: int
    kept: list[int]
    arrived: float
    first: float = 0.0
    ended: float = 0.0
    matched: int = 0
    route: Route | None = None

    @property
    def own_blocks(self) -> int:
        """Blocks that nobody shares with it."""
        return self.branches * ceil(self.new_tokens / BLOCK_TOKENS) + (self.prompt_tokens % BLOCK_TOKENS > 0)


@dataclass
class Running:
    """A job in a replica: rows of its prompt that are to be computed, and tokens that a branch has decoded."""

    job: Job
    to_compute: int
    decoded: int = 0


@dataclass
class Stretch:
    """Steps of a replica that are all alike: one with rows of prompts, or several that decode."""

    start: float
    steps: int
    rows: int
    tokens: int
    prompts: list[tuple[Running, int]]

    def work(self, steps: int) -> tuple[int, int, int, int]:
        """Return what is in the first `steps` of it, as `StepCosts.seconds` wants it."""
        # Each row that decodes leaves a token, which the steps behind it read.
        tokens = steps * self.tokens + self.rows * steps * (steps - 1) // 2
        return steps, steps * self.rows, tokens, sum(rows for _, rows in self.prompts)


@dataclass(eq=False)
class SimulatedReplica:
    """An engine by its step costs, its pool, and its prefix cache, which drops what was used least recently.

    Requests begin in the order in which they come, each when the pool has room for all that it will decode, so that
    none has to give way. Every step has a row of each branch, and as many rows of prompts as there is room for.

    Parameters
    ----------
    name : str
    costs : StepCosts
    pool_tokens : int
        Tokens whose keys and values it has room for.
    max_num_rows : int
        The most rows of a step.

    Attributes
    ----------
    busy : float
        Seconds in which it has computed.
    done : list of int
        Steps, rows that decoded, tokens that were read, and rows of prompts.
    """

    name: str
    costs: StepCosts
    pool_tokens: int
    max_num_rows: int = 8192
    busy: float = field(default=0.0, init=False)
    done: list[int] = field(default_factory=lambda: [0, 0, 0, 0], init=False)  # as `StepCosts.seconds` wants it
    waiting: deque[Job] = field(default_factory=deque, init=False)
    running: list[Running] = field(default_factory=list, init=False)
    held: dict[int, int] = field(default_factory=dict, init=False)  # how many jobs hold a block
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # blocks that nobody holds
    own: int = field(default=0, init=False)  # blocks that are one job's alone
    stretch: Stretch | None = field(default=None, init=False)

    def check(self, job: Job) -> None:
        """Refuse what would wait for ever.

        Raises
        ------
        ValueError
            If a job is larger than the pool, or wider than a step.
        """
        if (blocks := len(job.blocks) + job.own_blocks) > self.pool_tokens // BLOCK_TOKENS:
            raise ValueError(f"pool_tokens: {self.pool_tokens} are no room for {blocks * BLOCK_TOKENS} of a request")
        if job.branches > self.max_num_rows:
            raise ValueError(f"max_num_rows: {self.max_num_rows} are no room for {job.branches} branches")

    @property
    def num_blocks(self) -> int:
        """Blocks in use, cached ones included."""
        return len(self.held) + len(self.cached) + self.own

    @property
    def end(self) -> float | None:
        """When the steps under way end."""
        return None if self.stretch is None else self.stretch.start + self._seconds(self.stretch, self.stretch.steps)

    def take(self, job: Job, now: float) -> None:
        """Take a job; it begins behind the step under way."""
        self.waiting.append(job)
        if (stretch := self.stretch) is None:
            self._go_on(now)
        else:
            ends = range(1, stretch.steps + 1)
            passed = bisect_left(ends, now - stretch.start, key=lambda steps: self._seconds(stretch, steps))
            stretch.steps = min(stretch.steps, passed + 1)

    def finish(self) -> list[Job]:
        """Do the steps under way, and return the jobs that have ended with them."""
        stretch, now = self.stretch, self.end
        assert stretch is not None and now is not None
        self.busy += now - stretch.start
        self.done = [sum(pair) for pair in zip(self.done, stretch.work(stretch.steps), strict=True)]
        for each in self.running:
            each.decoded += stretch.steps if not each.to_compute else 0
        for each, rows in stretch.prompts:
            each.to_compute -= rows
            if not each.to_compute:
                each.decoded, each.job.first = 1, now
        ended = [each.job for each in self.running if each.decoded >= each.job.new_tokens]
        self.running = [each for each in self.running if each.decoded < each.job.new_tokens]
        for job in ended:
            job.ended = now
            self._release(job)
        self._go_on(now)
        return ended

    def _go_on(self, now: float) -> None:
        """Plan the steps that come next."""
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.popleft()
        rows = own = 0
        prompts, shortest = [], None
        for each in self.running:
            own += each.job.prompt_tokens % BLOCK_TOKENS + each.job.branches * each.decoded
            if not each.to_compute:
                rows += each.job.branches
                left = each.job.new_tokens - each.decoded
                shortest = left if shortest is None else min(shortest, left)
        room = self.max_num_rows - rows
        for each in self.running:
            if each.to_compute and room > 0:
                prompts.append((each, min(room, each.to_compute)))
                room -= prompts[-1][1]
        steps = 1 if prompts else shortest or 0
        tokens = BLOCK_TOKENS * len(self.held) + own
        self.stretch = Stretch(now, steps, rows, tokens, prompts) if steps else None

    def _seconds(self, stretch: Stretch, steps: int) -> float:
        return self.costs.seconds(*stretch.work(steps))

    def _admit(self, job: Job) -> bool:
        """Begin a job if there is room, and tell whether there was."""
        if sum(each.job.branches for each in self.running) + job.branches > self.max_num_rows:
            return False
        known = bisect_left(job.blocks, True, key=lambda block: block not in self.held and block not in self.cached)
        # What it finds in the cache is not room for what it does not find.
        revived = sum(block in self.cached for block in job.blocks[:known])
        needed = len(job.blocks) - known + job.own_blocks
        capacity = self.pool_tokens // BLOCK_TOKENS
        if len(self.held) + self.own + revived + needed > capacity:
            return False
        for block in job.blocks[:known]:
            self.cached.pop(block, None)
            self.held[block] = self.held.get(block, 0) + 1
        while self.num_blocks + needed > capacity:
            self.cached.popitem(last=False)
        for block in job.blocks[known:]:
            self.cached.pop(block, None)
            self.held[block] = self.held.get(block, 0) + 1
        self.own += job.own_blocks
        # The last token is computed in any case: its logits are wanted.
        job.matched = min(known * BLOCK_TOKENS, job.prompt_tokens - 1)
        self.running.append(Running(job, job.prompt_tokens - job.matched))
        return True

    def _release(self, job: Job) -> None:
        """Leave a job's prompt, and what the next turn will find, in the cache."""
        self.own -= job.own_blocks
        # The first block comes last, so that of no prefix an earlier block is dropped before a later one.
        for block in reversed(job.kept):
            if block not in self.held and self.num_blocks < self.pool_tokens // BLOCK_TOKENS:
                self.cached[block] = None
                self.cached.move_to_end(block)
        for block in reversed(job.blocks):
            if self.held[block] > 1:
                self.held[block] -= 1
            else:
                del self.held[block]
                self.cached[block] = None
                self.cached.move_to_end(block)


@dataclass(frozen=True)
class Outcome:
    """What became of the requests.

    Attributes
    ----------
    jobs : list of Job
        In the order in which they ended.
    seconds : float
        From the first request to the last end.
    begin, end : float
        Between these all clients were busy, and caches were no longer empty; rates are of this time.
    busy : list of float
        Share of the time in which each replica computed.
    """

    jobs: list[Job]
    seconds: float
    begin: float
    end: float
    busy: list[float]

    def summary(self) -> dict[str, Any]:
        """Return rates, waits and shares, as JSON can hold them."""
        counted = [job for job in self.jobs if self.begin < job.ended <= self.end] or self.jobs
        span = self.end - self.begin
        prompt = sum(job.prompt_tokens for job in counted)
        first = percentiles([job.first - job.arrived for job in counted]) or {}
        whole = percentiles([job.ended - job.arrived for job in counted]) or {}
        return {
            "requests": len(self.jobs),
            "seconds": self.seconds,
            "requests_per_s": len(counted) / span,
            "tokens_per_s": sum(job.branches * job.new_tokens for job in counted) / span,
            "prefix_hits": sum(job.matched for job in counted) / prompt,
            "ttft_s": {name: first.get(name) for name in ("p50", "p90")},
            "latency_s": {name: whole.get(name) for name in ("p50", "p90")},
            "busy": statistics.fmean(self.busy),
            "busiest": max(self.busy),
        }


def simulate(
    sessions: Sequence[Session], router: Router, replicas: Sequence[SimulatedReplica], clients: int
) -> Outcome:
    """Let clients go through sessions, one after the other each, until all have ended.

    Parameters
    ----------
    sessions : sequence of Session
    router : Router
        Knows no replica yet.
    replicas : sequence of SimulatedReplica
        Idle, with empty caches.
    clients : int
        Sessions under way at a time.

    Raises
    ------
    ValueError
        If a request does not fit a replica.
    """
    by_name = {replica.name: replica for replica in replicas}
    for replica in replicas:
        router.add(replica.name, replica.pool_tokens)
    order = count()
    arrivals: list[tuple[float, int, int, int]] = []  # when, in which order, session and turn
    ends: list[tuple[float, int, SimulatedReplica]] = []  # of steps; those of steps that were cut short stay behind
    to_start = iter(range(len(sessions)))
    jobs: list[Job] = []
    begin = last_start = 0.0
    num_warm = int(WARM * sum(map(len, sessions)))

    def arrive(now: float, session: int, turn: int) -> None:
        heapq.heappush(arrivals, (now, next(order), session, turn))

    def look_at(replica: SimulatedReplica) -> None:
        if replica.end is not None:
            heapq.heappush(ends, (replica.end, next(order), replica))

    for session in islice(to_start, clients):
        arrive(0.0, session, 0)
    while arrivals or ends:
        # Of what happens at the same time, steps end first.
        if ends and (not arrivals or ends[0][0] <= arrivals[0][0]):
            now, _, replica = heapq.heappop(ends)
            if replica.end != now:
                continue
            for job in replica.finish():
                assert job.route is not None
                router.ended(job.route)
                jobs.append(job)
                if len(jobs) == num_warm:
                    begin = now
                following = sessions[job.session][job.turn + 1 : job.turn + 2]
                if following:
                    arrive(now + following[0].pause, job.session, job.turn + 1)
                elif (session := next(to_start, -1)) >= 0:
                    arrive(now, session, 0)
                    last_start = now
            look_at(replica)
        else:
            now, _, session, turn = heapq.heappop(arrivals)
            prompt, job = _job(sessions[session], session, turn, now)
            job.route = router.route(prompt, decode=job.branches * job.new_tokens)
            router.began(job.route)
            replica = by_name[job.route.name]
            replica.check(job)
            replica.take(job, now)
            look_at(replica)
    seconds = max(job.ended for job in jobs)
    if last_start <= begin:  # too few sessions for a time in which all clients were busy
        begin, last_start = 0.0, seconds
    return Outcome(jobs, seconds, begin, last_start, [replica.busy / seconds for replica in replicas])


def _job(session: Session, number: int, turn: int, now: float) -> tuple[list[int], Job]:
    """Return a turn's prompt, and the turn as a job."""
    said: list[int] = []
    for place, each in enumerate(session[: turn + 1]):
        said += chain.from_iterable(each.tokens)
        if place < turn:
            said += _answer(number, place, each)
    asked = session[turn]
    blocks = list(_blocks(said))
    kept = list(_blocks([*said, *_answer(number, turn, asked)]))[len(blocks) :] if turn + 1 < len(session) else []
    return said, Job(number, turn, blocks, len(said), asked.branches, asked.new_tokens, kept, now)


def _answer(session: int, turn: int, asked: Turn) -> range:
    """Return the tokens of the answer that a session goes on from, which no other has."""
    first = -((session << 32) + (turn << 16)) - 1
    return range(first, first - asked.new_tokens, -1)


def _blocks(tokens: Sequence[int]) -> Iterator[int]:
    """Yield the hash of each whole block with all before it."""
    seed = 0
    for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
        seed = hash((seed, tuple(tokens[end - BLOCK_TOKENS : end])))
        yield seed

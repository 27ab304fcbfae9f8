"""The step loop, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, cast

from torch import Tensor

from treewise.awaitables import Call, Decode, Gather, Observe, Operation
from treewise.batch import Batch
from treewise.branch import Branch, BranchTree
from treewise.budgets import Budget, Limit
from treewise.codec import Codec
from treewise.config import check_integer
from treewise.decoding import DecodeRun, Drawn, draw
from treewise.graphs import Plans
from treewise.kv import KVManager
from treewise.operations import Gain, InvalidLogits, Limits, ObserveRun, Run
from treewise.results import Usage
from treewise.runner import Runner
from treewise.sampler import row_key
from treewise.scheduler import Crowded, Delivery, KeysGivenUp, Lane, PoolTooSmall, Scheduler
from treewise.sparsity.policy import KVSparsity
from treewise.sparsity.scorers.kvzip import REPEAT
from treewise.speculate.draft import Draft
from treewise.speculate.speculator import Speculator
from treewise.streams import Piece
from treewise.tasks import Task
from treewise.thicket import Thicket
from treewise.thinning import Thinner

Program = Callable[[Branch], Coroutine[Any, Any, Any]]


@dataclass(eq=False)
class Request:
    """One prompt and the program that runs over its tree.

    Attributes
    ----------
    id : int
    tree : BranchTree
    done : bool
        Whether the program has ended, with `result` or with `error`.
    """

    id: int
    tree: BranchTree
    started: float
    done: bool = False
    result: Any = None
    error: BaseException | None = None
    steps: int = 0
    rows: int = 0
    kv_bytes_read: int = 0
    kv_bytes_per_sequence: int = 0
    kv_bytes_held: int = 0
    seconds: float = 0.0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def usage(self) -> Usage:
        """Return what the request has cost so far."""
        given = len(self.tree.prompt_tokens)
        return Usage(
            prompt_tokens=given,
            completion_tokens=self.tree.num_decoded,
            steps=self.steps,
            rows=self.rows,
            kv_bytes_read=self.kv_bytes_read,
            kv_bytes_per_sequence=self.kv_bytes_per_sequence,
            seconds=self.seconds,
            cached_tokens=min(self.tree.cached_tokens, given),
            drafts=self.drafts,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            kv_bytes_held=self.kv_bytes_held,
        )


class Engine:
    """Runs programs over trees, all of them in one batch a step.

    Parameters
    ----------
    runner : Runner
    kv : KVManager
    codec : Codec
    limits : Limits
    max_num_rows : int
        The most rows of one step.
    seed : int
        Requests without a seed of their own draw theirs from this and their rank of arrival.
    speculator : Speculator, optional
        Guesses what follows leaves that only draw.

    Attributes
    ----------
    num_steps, num_rows : int
        Forward passes so far, and rows computed in them.
    looks_ahead : bool
        Whether a step starts the forward after the tokens of the one before, which are on the device, before the host
        knows them: on a GPU, where the host then works while the device does. A branch that ended with its token was
        in vain in that forward. Tokens of a step are told of by the next call of `step`.
    """

    def __init__(
        self,
        runner: Runner,
        kv: KVManager,
        codec: Codec,
        limits: Limits,
        max_num_rows: int,
        seed: int,
        speculator: Speculator | None = None,
    ) -> None:
        self.runner = runner
        self.kv = kv
        self.codec = codec
        self.limits = limits
        self.scheduler = Scheduler(kv, max_num_rows)
        self.thinner = Thinner(runner, kv, max_num_rows)
        self.looks_ahead = runner.device.type == "cuda"
        self.seed = seed
        self.speculator = speculator
        self.requests: dict[BranchTree, Request] = {}
        self.runs: list[Run] = []
        self.num_steps = 0
        self.num_rows = 0
        self._ids = count()
        self._ready: deque[tuple[Task, Any, BaseException | None]] = deque()
        self._calls: dict[Future[Any], Task] = {}
        self._drawn: Drawn | None = None  # from the last logits, not known to the host
        self._stepping = False
        self._aborted: list[Request] = []  # during the step under way
        self._workers = ThreadPoolExecutor(4, thread_name_prefix="treewise-call")

    def add(
        self,
        program: Program,
        prompt_tokens: Sequence[int],
        seed: int | None = None,
        *,
        priority: int = 0,
        namespace: str = "",
        budget: Budget | None = None,
        sparsity: KVSparsity | None = None,
    ) -> Request:
        """Start `program` on a new tree whose root holds `prompt_tokens`.

        Parameters
        ----------
        program : async function
        prompt_tokens : sequence of int
        seed : int, optional
        priority : int
            Requests of higher priority get rows first, and slots at the cost of lower ones; among equal ones the
            earlier goes first. Waiting does not raise it.
        namespace : str
            Only requests of one namespace share cached prefixes.
        budget : Budget, optional
            What the program may use, from now on; not to be shared by requests.
        sparsity : KVSparsity, optional
            Which keys of the prompt stay once it is computed; all by default.

        Raises
        ------
        ValueError
            If the prompt is empty, longer than the context or too large for the KV pool, the program is no async
            function, or an option is of a wrong type; nothing was started then.
        RuntimeError
            If a step is under way, see `step`.
        """
        if not prompt_tokens:
            raise ValueError("prompt: it has no tokens, and this model puts none in front by itself")
        if len(prompt_tokens) > self.limits.max_model_len:
            raise ValueError(f"prompt: {len(prompt_tokens)} tokens exceed max_model_len={self.limits.max_model_len}")
        if len(prompt_tokens) >= self.kv.num_slots:
            raise ValueError(f"prompt: {len(prompt_tokens)} tokens do not fit the KV pool of {self.kv.num_slots} slots")
        check_integer("priority", priority)
        if not isinstance(namespace, str):
            raise ValueError(f"namespace: {namespace!r} is not a text")
        self._refuse_inside_a_step()
        request_id = next(self._ids)
        seed = row_key(self.seed, (request_id,)) if seed is None else seed
        thinning = None if sparsity is None else self.thinner.thinning(sparsity, len(prompt_tokens))
        again: list[int] = []
        if sparsity is not None and sparsity.second_pass and thinning is not None:
            again = [*self.codec.encode(REPEAT, add_special_tokens=False), *prompt_tokens, prompt_tokens[-1]]
            if (total := len(prompt_tokens) + len(again)) > self.limits.max_model_len:
                raise ValueError(
                    f"kv_sparsity: {sparsity.scoring!r} reads the prompt twice, which makes {total} tokens; "
                    f"they exceed max_model_len={self.limits.max_model_len}"
                )
        tree = BranchTree(self.kv, self.codec, prompt_tokens, seed, request_id, priority, namespace, thinning)
        if again:
            program = _after_reading(again, program)
        try:
            coroutine = program(tree.root)
            if not isinstance(coroutine, Coroutine):
                raise ValueError(f"program: an async function is wanted, not one that returns {coroutine!r}")
        except BaseException:
            tree.close()
            raise
        if sparsity is not None and thinning is not None:
            self.thinner.add(tree, sparsity)
        request = self.requests[tree] = Request(request_id, tree, perf_counter())
        task = Task(tree, coroutine, partial(self._finish, request), budget=budget)
        self._ready.append((task, None, None))
        return request

    def abort(self, request: Request) -> None:
        """End `request` now, or after the step under way; its keys stay behind as cached prefixes.

        Nothing happens when it has ended already.
        """
        if self._stepping:
            self._aborted.append(request)
        elif not request.done:
            self._forget([task.lineage() for task in self._waiting() if task.tree is request.tree])
            self._finish(request, None, RuntimeError("the request was aborted"))

    def step(self) -> list[Gain]:
        """Run the programs up to their next operations, and one forward for everything they wait for.

        Returns
        -------
        list of Gain
            What branches gained.

        Raises
        ------
        RuntimeError
            If a step is under way: a program wants to step the engine that runs it, or another thread does.
        """
        self._refuse_inside_a_step()
        self._stepping = True
        try:
            gains = self._step()
            self.runner.check()
            return gains
        finally:
            self._stepping = False
            while self._aborted:
                self.abort(self._aborted.pop())

    def _step(self) -> list[Gain]:
        self._run_programs()
        if self.speculator is not None:
            self.speculator.begin()
        unsettled = () if self._drawn is None else {run.task.tree for run in self._drawn.runs}
        self.scheduler.num_preemptions += self.thinner.begin(self.requests, self._lanes, unsettled)
        drawn = self._assume()
        try:
            try:
                self._forward(drawn)
            finally:
                gains = [] if drawn is None else self._know(drawn)
            return gains + self._advance()
        finally:
            self._end_guesses()

    def _forward(self, drawn: Drawn | None) -> None:
        """Compute what everything waits for, after tokens that were drawn if need be, and draw from it."""
        try:
            batch, deliveries, waiting = self._next_batch()
        except (PoolTooSmall, KeysGivenUp) as error:
            self._fail(cast(BranchTree, error.tenant), error)
            return
        batch = self.thinner.look_back(batch)
        if batch.num_rows:
            try:
                batch = self._guess(batch, deliveries, waiting)
                seen = self.thinner.watch(batch)
                plans = self.runner.plan(batch, self.kv)
                tokens = None if drawn is None else drawn.choices.tokens
                logits = self.runner.forward(batch, plans, self.kv, tokens, self._see, seen)
            except BaseException:
                # Nobody knows which keys were written or moved: all are computed again, should anybody step on.
                self._settle_all()
                self.kv.clear_cache()
                self.kv.preempt([tip for tree in self.requests for tip in tree.tips()])
                raise
            self.scheduler.commit(batch, deliveries)
            self._count(batch, plans, deliveries)
            for delivery in deliveries:
                self._deliver(waiting[delivery.lane], delivery, logits)
            drafts = {} if self.speculator is None else self.speculator.drafts
            self._drawn = draw(self.runs, self.limits.eos_token_ids, drafts)
            self.scheduler.num_preemptions += self.thinner.thin_out(self.requests)
            self.runner.plan_ahead(batch, self.kv)
        elif drawn is None and not self.thinner.hurry() and self._calls and not self._ready:
            patience = [left for task in self._calls.values() if (left := task.seconds_left()) is not None]
            wait(self._calls, min(patience, default=None), FIRST_COMPLETED)

    def _see(self, hidden: Tensor) -> None:
        """Look at what comes before the output head, see `Runner.forward`."""
        self.thinner.see(hidden)
        if self.speculator is not None:
            self.speculator.see(hidden)

    def _guess(self, batch: Batch, deliveries: list[Delivery], waiting: dict[Lane | Thicket, Run]) -> Batch:
        """Return the batch with guesses of what follows its leaves beside it, if there are any."""
        if self.speculator is None:
            return batch
        stems = [
            stem
            for lane, _, places in deliveries
            if isinstance(run := waiting[lane], DecodeRun) and (stem := run.stem(lane, places[-1])) is not None
        ]
        drafts = self.speculator.draft(batch, stems, self.scheduler.max_num_rows - batch.num_rows)
        return batch.beside(drafts) if drafts else batch

    def _end_guesses(self) -> None:
        """Give back what guesses had, but for the keys of those that were right."""
        drafts = [] if self.speculator is None else self.speculator.finish()
        if drafts and self._drawn is not None:  # the step has failed before anybody knew
            for run in self._drawn.runs:
                run.forgo_guesses()
        for draft in drafts:
            if (request := self.requests.get(draft.tenant)) is not None:
                request.drafts += 1
                request.drafted_tokens += len(draft.rows)
                request.accepted_tokens += len(draft.accepted)

    def _next_batch(self) -> tuple[Batch, list[Delivery], dict[Lane | Thicket, Run]]:
        """Return the rows of the step, who gets which logits, and who waits for any."""
        waiting = dict(self._lanes())
        try:
            reserved = self.thinner.num_missing()
            return *self.scheduler.next_batch(list(waiting), list(self.requests), reserved), waiting
        except Crowded:
            self._settle_all()
            return self._next_batch()

    def _lanes(self) -> Iterator[tuple[Lane | Thicket, Run]]:
        """Yield the paths whose logits somebody waits for, and who does."""
        return ((lane, run) for run in self.runs for lane in run.lanes())

    def _settle_all(self) -> None:
        for tree in self.requests:
            tree.settle()

    def check_integrity(self) -> None:
        """Verify the forest and the pool; when nothing runs, that nobody holds anything either.

        Raises
        ------
        AssertionError
            If an invariant is broken; this is a fault of ours, never of the user's input.
        """
        self.kv.check_integrity()
        holders = sum(node.holders for node in self.kv.forest)
        living = sum(len(list(tree.tips())) for tree in self.requests)
        assert holders == living, f"{holders} holds for {living} live branches"

    # ------------------------------------------------------------------ programs

    def _run_programs(self) -> None:
        """Resume every program whose operation is over until all wait for logits or for a function."""
        for future in [future for future in self._calls if future.done()]:
            error = future.exception()
            self._ready.append((self._calls.pop(future), None if error else future.result(), error))
        while self._ready:
            task, value, error = self._ready.popleft()
            task.tree.settle()
            operation = task.resume(value, error)
            if operation is not None:
                try:
                    self._start(task, operation)
                except Exception as mistake:
                    self._ready.append((task, None, mistake))

    def _start(self, task: Task, operation: Operation[Any]) -> None:
        if task.budgets and (verdict := task.verdict()) is not None and not isinstance(operation, Gather | Limit):
            raise verdict
        match operation:
            case Piece():  # the first, since there may be one for every token
                self.runs += self._answer_those_over((operation.run(task, self.limits),))
            case Decode():
                self.runs += self._answer_those_over((DecodeRun(task, operation, self.limits),))
            case Observe():
                self.runs += self._answer_those_over((ObserveRun(task, operation, self.limits),))
            case Call():
                self._calls[self._workers.submit(operation.function, *operation.arguments)] = task
            case Gather():
                self._gather(task, operation)
            case Limit():
                answer = partial(self._answer, task)
                part = Task(task.tree, operation.coroutine, answer, task, operation.budget)
                self._ready.append((part, None, None))

    def _answer(self, task: Task, result: Any, error: BaseException | None) -> None:
        """Let `task` go on with what its operation came to."""
        self._ready.append((task, result, error))

    def _gather(self, task: Task, operation: Gather) -> None:
        """Start the coroutines; the first error ends the others and is the gathering program's."""
        if operation.begin is not None:
            raise RuntimeError("what gather returns can be awaited once only")
        waiting = 0
        results: list[Any] = []

        def begin(coroutine: Coroutine[Any, Any, Any]) -> None:
            nonlocal waiting
            waiting += 1
            self._ready.append((Task(task.tree, coroutine, partial(finish, len(results)), task), None, None))
            results.append(None)

        def finish(i: int, result: Any, error: BaseException | None) -> None:
            nonlocal waiting
            waiting -= 1
            results[i] = result
            if operation.over or (error is None and waiting):
                return
            operation.over = True
            if error is not None:
                lines = [other.lineage() for other in self._waiting()]
                self._forget([line[: line.index(task)] for line in lines if task in line])
            self._answer(task, results, error)

        operation.begin = begin
        for coroutine in operation.coroutines:
            begin(coroutine)
        if not waiting:
            operation.over = True
            self._answer(task, results, None)

    def _waiting(self) -> list[Task]:
        """Return the tasks that wait for something, but for those that gather others."""
        return [run.task for run in self.runs] + list(self._calls.values()) + [ready[0] for ready in self._ready]

    def _forget(self, lines: Sequence[Sequence[Task]]) -> None:
        """End the tasks of `lines`, each of which gathers the one before it, and stop waiting on their behalf."""
        depth = {task: len(line) - i for line in lines for i, task in enumerate(line)}
        for task in sorted(depth, key=depth.__getitem__, reverse=True):
            task.close()
        for future in [future for future, task in self._calls.items() if task in depth]:
            future.cancel()
            del self._calls[future]
        self.runs = [run for run in self.runs if run.task not in depth]
        self._ready = deque(ready for ready in self._ready if ready[0] not in depth)

    def _enforce_budgets(self) -> None:
        """Raise what is due in everything that waits on behalf of a part whose budget is used up."""
        for run in self.runs[:]:
            if (verdict := run.task.verdict()) is not None:
                self.runs.remove(run)
                self._answer(run.task, None, verdict)
        for future, task in list(self._calls.items()):
            if not future.done() and (verdict := task.verdict()) is not None:
                future.cancel()
                del self._calls[future]
                self._answer(task, None, verdict)

    def _fail(self, tree: BranchTree, error: BaseException) -> None:
        """Raise `error` in everything that waits for logits of `tree`."""
        for run in [run for run in self.runs if run.task.tree is tree]:
            self.runs.remove(run)
            self._ready.append((run.task, None, error))

    def _finish(self, request: Request, result: Any, error: BaseException | None) -> None:
        request.done, request.result, request.error = True, result, error
        request.seconds = perf_counter() - request.started
        request.tree.settle()
        request.kv_bytes_held = self.kv.num_held(request.tree.tips()) * self.runner.kv_bytes_per_token
        request.tree.close()
        self.thinner.remove(request.tree)
        del self.requests[request.tree]

    # ------------------------------------------------------------------ logits

    def _deliver(self, run: Run, delivery: Delivery, logits: Tensor) -> None:
        try:
            run.deliver(delivery.lane, delivery.start, logits, delivery.places)
        except Exception as error:
            self._fail(run.task.tree, error)

    def _assume(self) -> Drawn | None:
        """Let leaves go on with what was drawn for them; gives what that was."""
        drawn, self._drawn = self._drawn, None
        going_on = set(self.runs)
        for run in drawn.runs if drawn else ():
            if run in going_on:
                self._take_step(run, run.assume)
            else:
                run.forgo()  # it may be taken up again
        return drawn

    def _know(self, drawn: Drawn) -> list[Gain]:
        """Take what leaves went on with to the host; waits for the device."""
        try:
            choices = drawn.choices.read()
        except BaseException:  # nobody waits any longer: should anybody step on, it is drawn again
            following, self._drawn = self._drawn, None
            for run in following.runs if following else ():
                run.forgo()
            for run in drawn.runs:
                run.take_back()
            raise
        gains: list[Gain] = []
        for run in drawn.runs:
            gain = self._take_step(run, partial(run.know, choices))
            if gain is not None:
                gains.append(gain)
        return gains

    def _advance(self) -> list[Gain]:
        """Let every run that has the logits for it take its step."""
        gains: list[Gain] = []
        if self._drawn is not None and not self._may_look_ahead(self._drawn):
            drawn = self._assume()
            gains += self._know(cast(Drawn, drawn))
        for run in [run for run in self.runs if run.ready()]:
            if (gain := self._take_step(run, run.advance)) is not None:
                gains.append(gain)
        self.runs = self._answer_those_over(self.runs)
        self._enforce_budgets()
        return gains

    def _may_look_ahead(self, drawn: Drawn) -> bool:
        """Whether the next forward can start before the host knows what was drawn."""
        guesses = self.speculator is not None and not self.speculator.resting
        if not self.looks_ahead or (guesses and any(run.speculates for run in drawn.runs)):
            return False
        return drawn.is_foreseeable

    def _take_step(self, run: Run, step: Callable[[], Gain | None]) -> Gain | None:
        """Let `run` take a step of its; only its own program hears of an error, unless it has heard of another."""
        try:
            gain = step()
            if gain is not None:
                run.task.charge(gain.num_tokens)
            return gain
        except InvalidLogits as error:
            self._fail(run.task.tree, error)
        except Exception as error:  # a controller is the user's code
            if run in self.runs:
                self.runs.remove(run)
                self._answer(run.task, None, error)
        return None

    def _answer_those_over(self, runs: Iterable[Run]) -> list[Run]:
        """Give the results of runs that are over to their programs, and return the other runs, which want logits."""
        going_on = []
        for run in runs:
            if (result := run.result()) is None:
                going_on.append(run)
            else:
                self._ready.append((run.task, result, None))
        return going_on

    def _refuse_inside_a_step(self) -> None:
        if self._stepping:
            raise RuntimeError(
                "the engine is in the middle of a step: a program awaits operations, "
                "such as `await generate(...)`, and one thread at a time uses an LLM"
            )

    def _count(self, batch: Batch, plans: Plans, deliveries: list[Delivery]) -> None:
        """Charge the step to the trees that had rows in it, each in proportion."""
        self.num_steps += 1
        self.num_rows += batch.num_rows
        bytes_read = self.runner.kv_bytes(plans)
        for tree, number in batch.rows_of_owners.items():
            request = self.requests[cast(BranchTree, tree)]
            request.steps += 1
            request.rows += number
            request.kv_bytes_read += round(bytes_read * number / batch.num_rows)
        lengths: list[int] = []
        ends: list[tuple[Any, int]] = []
        for lane, start, places in deliveries:
            lengths += lane.lengths(start, len(places))
            ends.append((lane.tenant, len(lengths)))
        for growth, rows in batch.growths:
            if isinstance(growth, Draft):
                lengths += growth.length[rows].tolist()
                ends.append((growth.tenant, len(lengths)))
        alone, begin = self.runner.kv_bytes_of_paths(lengths), 0
        for tenant, end in ends:
            self.requests[tenant].kv_bytes_per_sequence += sum(alone[begin:end])
            begin = end


def _after_reading(tokens: Sequence[int], program: Program) -> Program:
    """Return a program that begins when `tokens` have been read behind the prompt, by a branch that leaves nothing."""

    async def begin(root: Branch) -> Any:
        reader = root.scratch().append(tokens)
        await Observe([reader], [reader.num_tokens - 1])
        reader.prune()
        return await program(root)

    return begin

"""One program over many prompts, so many at a time, with a file of results that a later run goes on from."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from treewise.bench.measure import progress as progress_bar
from treewise.branch import Branch
from treewise.config import check_integer
from treewise.outputs import completions
from treewise.results import ProgramOutput, Tree, Usage, json_safe
from treewise.sampler import row_key

Program = Callable[..., Coroutine[Any, Any, Any]]
Errors = Literal["raise", "keep"]

BEGINNING = b'{"index": '
"""Of every line."""


class Engines(Protocol):
    """Where programs run: an `LLM`, or many of them."""

    model_name: str

    def start(self, program: Program, prompt: Any, *, seed: int | None = None, **kwargs: Any) -> Future[ProgramOutput]:
        """Start a program and come back at once; see `LLM.start`."""

    def wait(self, futures: Collection[Future[ProgramOutput]]) -> None:
        """Come back once at least one of some futures of `start` has ended; what has befallen all, raise."""


@dataclass(frozen=True)
class Mapped:
    """What has come of one prompt, the same whether it was computed now or read from a file.

    Attributes
    ----------
    index : int
        Place among the prompts.
    value : object
        What the program returned, as JSON holds it: dataclasses are dicts, and a branch is a dict with the fields of
        `CompletionOutput`. None where it failed.
    usage : Usage or None
        What it cost; None where it failed.
    error : str or None
        What the program raised, with its type.
    tree : Tree or None
        The whole tree, where trees were asked for.
    """

    index: int
    value: Any = None
    usage: Usage | None = None
    error: str | None = None
    tree: Tree | None = None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Mapped:
        """Read what a line of a file says."""
        usage, tree = record.get("usage"), record.get("tree")
        return cls(
            index=record["index"],
            value=record.get("value"),
            usage=None if usage is None else Usage(**usage),
            error=record.get("error"),
            tree=None if tree is None else Tree.from_json(json.dumps(tree)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what a line of a file says, and `read` reads; what there is none of is left out."""
        told: dict[str, Any] = {"index": self.index, "error": self.error}
        if self.error is None:
            told = {"index": self.index, "value": self.value, "usage": self.usage and asdict(self.usage)}
        return told if self.tree is None else told | {"tree": self.tree.to_dict()}


def map_programs(
    program: Program,
    prompts: Sequence[Any],
    engines: Engines,
    *,
    seed: int = 0,
    output: str | PathLike[str] | None = None,
    in_flight: int = 64,
    ordered: bool = True,
    errors: Errors = "raise",
    trees: bool = False,
    progress: bool = True,
    **kwargs: Any,
) -> Iterator[Mapped]:
    """Run ``program(root, **kwargs)`` for each of many prompts, and yield what comes of them.

    A prompt's seed is made of `seed` and its place alone: results depend neither on the order in which programs end,
    nor on how many run at a time, nor on where. While nobody asks for the next result, an `LLM` stands
    still, and no more programs are started anywhere.

    Parameters
    ----------
    program : async function
        As in `LLM.run`.
    prompts : sequence of str, list of int, or list of messages
    engines : Engines
        An `LLM`, which runs the programs as one batch, or `treewise.replicas.outside.Replicas`.
    seed : int
    output : path, optional
        A file of JSON, a line a prompt in the order in which they end; each is there before it is yielded. What a
        file has already is yielded from it, and not computed again; half a line at its end, of a run that was killed,
        is cut off. Each line has a digest of program, arguments, model, prompt and seed.
    in_flight : int
        The most programs under way.
    ordered : bool
        Yield in the order of the prompts; else as they end, those first that the file has.
    errors : {"raise", "keep"}
        What becomes of a program that raises: raise it here and end the others, or yield it as `Mapped.error` and go
        on. Errors that a file has are those of prompts to be tried again under ``"raise"``.
    trees : bool
        Keep the whole trees, in the file too.
    progress : bool
        Show on a terminal how far everything is.

    Raises
    ------
    ValueError
        If an option is wrong, or the file is of other work; it is left as it is then.
    Exception
        What a program raised, under ``errors="raise"``; a note says of which prompt.

    Examples
    --------
    >>> from treewise import LLM, SamplingParams, generate
    >>> async def several(root, n):
    ...     return await generate(root.fork(n), SamplingParams(max_tokens=4))
    >>> results = map_programs(several, ["Once upon", "There was"], LLM("smollm2-135m"), n=3)
    >>> [len(result.value) for result in results]
    [3, 3]
    """
    check_integer("in_flight", in_flight, 1)
    if errors not in get_args(Errors):
        raise ValueError(f"errors: {errors!r} is not one of {', '.join(get_args(Errors))}")
    if isinstance(prompts, str | bytes):
        raise ValueError("prompts: give a list of prompts, not one text")
    prompts = list(prompts)
    file = None
    if output is not None:
        work = digest(program, kwargs, Path(engines.model_name).name, seed, trees)
        file = ResultFile(Path(output), [digest(work, prompt) for prompt in prompts], errors == "keep")
    run = _Run(program, kwargs, prompts, engines, seed, in_flight, errors == "keep", trees, progress, file)
    return run.in_order() if ordered else run.as_they_end()


@dataclass(frozen=True)
class _Run:
    """A map under way; see `map_programs` for its fields."""

    program: Program
    kwargs: Mapping[str, Any]
    prompts: Sequence[Any]
    engines: Engines
    seed: int
    in_flight: int
    keeps_errors: bool
    trees: bool
    progress: bool
    file: ResultFile | None

    def as_they_end(self) -> Iterator[Mapped]:
        """Yield what the file has, then the others."""
        there = self._there()
        yield from there.values()
        yield from self._computed(there)

    def in_order(self) -> Iterator[Mapped]:
        """Yield in the order of the prompts."""
        there = self._there()
        early: dict[int, Mapped] = {}
        with closing(self._computed(there)) as computed:
            for index in range(len(self.prompts)):
                while index not in there and index not in early:
                    result = next(computed)
                    early[result.index] = result
                yield there[index] if index in there else early.pop(index)

    def _there(self) -> Mapping[int, Mapped]:
        return {} if self.file is None else self.file.results()

    def _computed(self, there: Collection[int]) -> Generator[Mapped]:
        """Yield the results of prompts that are not there yet, as they end."""
        to_start = (index for index in range(len(self.prompts)) if index not in there)
        waiting: dict[Future[ProgramOutput], int] = {}
        with _bar(len(self.prompts), len(there), self.progress) as advance:
            try:
                while True:
                    for index in islice(to_start, self.in_flight - len(waiting)):
                        waiting[self._start(index)] = index
                    if not waiting:
                        return
                    self.engines.wait(waiting)
                    for future in [future for future in waiting if future.done()]:
                        result = self._settle(waiting.pop(future), future)
                        advance(result)
                        yield result
            finally:
                for future in waiting:
                    future.cancel()

    def _start(self, index: int) -> Future[ProgramOutput]:
        try:
            seed = row_key(self.seed, (index,))
            return self.engines.start(self.program, self.prompts[index], seed=seed, **self.kwargs)
        except ValueError as error:
            failed: Future[ProgramOutput] = Future()
            failed.set_exception(error)
            return failed

    def _settle(self, index: int, future: Future[ProgramOutput]) -> Mapped:
        """Return what has come of a prompt, written down."""
        try:
            output = future.result()
            result = Mapped(index, _plain(output.value), output.tree.usage, tree=output.tree if self.trees else None)
        except Exception as error:
            error.add_note(f"prompts[{index}]")
            if not self.keeps_errors:
                raise
            result = Mapped(index, error=f"{type(error).__name__}: {error}")
        if self.file is not None:
            self.file.write(result)
        return result


class ResultFile:
    """Lines of JSON, one a prompt, that a later run goes on from; the last line of a prompt counts.

    Parameters
    ----------
    path : Path
        Made if it is not there.
    digests : list of str
        Of the work on each prompt.
    keeps_errors : bool
        Whether a line with an error counts as done.

    Raises
    ------
    ValueError
        If a line is none of this work.
    """

    def __init__(self, path: Path, digests: Sequence[str], keeps_errors: bool) -> None:
        self.path, self.digests = path, digests
        self._places: dict[int, int] = {}  # where the line of a prompt begins
        end = 0
        with path.open("a+b") as file:
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                        raise self._refusal(number, "is no result")
                    file.truncate(end)
                    break
                record = self._parse(number, line)
                if keeps_errors or "error" not in record:
                    self._places[record["index"]] = end
                end += len(line)

    def results(self) -> Mapping[int, Mapped]:
        """Return what the file has now, by the prompt's place and in this order; it is read when asked for."""
        return _Stored(self.path, dict(sorted(self._places.items())))

    def write(self, result: Mapped) -> None:
        """Add a result."""
        record = {"index": result.index, "digest": self.digests[result.index]} | result.to_dict()
        line = json.dumps(record, allow_nan=False).encode()
        with self.path.open("ab") as file:
            file.write(line + b"\n")

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        """Return what a line says, checked."""
        try:
            record = json.loads(line)
            index, found = record["index"], record["digest"]
            if not 0 <= index < len(self.digests):
                raise self._refusal(number, f"is of prompt {index}, and there are {len(self.digests)}")
        except (TypeError, KeyError, json.JSONDecodeError, UnicodeDecodeError):
            raise self._refusal(number, "is no result") from None
        if found != self.digests[index]:
            raise self._refusal(
                number, f"is of other work: for prompt {index}, its program, arguments, model or seed were others"
            )
        return dict(record)

    def _refusal(self, number: int, why: str) -> ValueError:
        return ValueError(f"output: line {number} of {self.path} {why}; name another file, or take this one away")


@dataclass(frozen=True)
class _Stored(Mapping[int, Mapped]):
    """Results in a file, by the place of the prompt."""

    path: Path
    places: Mapping[int, int]

    def __getitem__(self, index: int) -> Mapped:
        with self.path.open("rb") as file:
            file.seek(self.places[index])
            return Mapped.read(json.loads(file.readline()))

    def __iter__(self) -> Iterator[int]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


@contextmanager
def _bar(total: int, done: int, is_shown: bool) -> Iterator[Callable[[Mapped], None]]:
    """Show how far a map is, and that a result has come whenever what is yielded is called."""
    failed = 0
    with progress_bar() if is_shown else nullcontext() as bar:
        task = None if bar is None else bar.add_task("", total=total, completed=done)

        def advance(result: Mapped) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + (result.error is not None)
            if bar is not None and task is not None:
                said = f"{done:,} of {total:,}" + (f", {failed:,} failed" if failed else "")
                bar.update(task, advance=1, description=said)

        yield advance


def _plain(value: Any) -> Any:
    """Return what a program returned as JSON gives it back."""
    try:
        return json.loads(json.dumps(json_safe(value), default=_branch, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"value: what the program returned cannot be written as JSON: {error}") from error


def _branch(value: Any) -> Any:
    """Return a branch as JSON can hold it."""
    if not isinstance(value, Branch):
        raise TypeError(f"{value!r} is of type {type(value).__name__}")
    return json_safe(completions([value])[0])


def digest(*parts: Any) -> str:
    """Return what tells work from other work: a checksum of values, and of the source text of functions.

    Raises
    ------
    ValueError
        If a value says nothing of itself that would be the same in another process.
    """
    return hashlib.sha256(json.dumps(_identity(parts)).encode()).hexdigest()[:32]


def _identity(value: Any) -> Any:
    """Return something for JSON that is equal for equal values, in other processes too."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if isinstance(value, Mapping):
        return sorted(json.dumps([_identity(key), _identity(item)]) for key, item in value.items())
    if isinstance(value, list | tuple | range):
        return [_identity(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and tensors, whose text leaves the middle out
        return _identity(value.tolist())
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_identity(item)) for item in value)
    if isinstance(value, partial):
        return [_identity(value.func), _identity(value.args), _identity(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__qualname__, *(_identity(getattr(value, item.name)) for item in fields(value))]
    if isinstance(value, type) or callable(value):
        return _source(value)
    if repr(value) == object.__repr__(value):
        raise ValueError(f"output: {value!r} says nothing by which a later run could tell it from another")
    return repr(value)


def _source(value: Any) -> Any:
    """Return name and text of a function or a class."""
    name = getattr(value, "__qualname__", type(value).__qualname__)
    try:
        return [name, inspect.getsource(value if hasattr(value, "__qualname__") else type(value))]
    except (OSError, TypeError):  # typed in at a prompt, or built in
        code = getattr(value, "__code__", None)
        return [name, code and code.co_code.hex(), code and repr(code.co_names)]

"""The text of one branch, piece by piece, inside a program."""

from __future__ import annotations

from collections.abc import Generator

from treewise.awaitables import Decode, Operation, generate
from treewise.branch import Branch
from treewise.config import SamplingParams
from treewise.decoding import DecodeRun
from treewise.operations import Limits
from treewise.tasks import Task


class StreamRun(DecodeRun):
    """Decodes one branch, and pauses whenever there is a piece of text that nothing can take back."""

    speculates = False  # a loop may be left at any piece, and the branch must be no longer than it is without guesses

    def __init__(self, task: Task, operation: Decode, limits: Limits) -> None:
        super().__init__(task, operation, limits)
        [self._track] = self.tracks.values()
        self._num_sent = 0  # characters
        self._num_read = 0  # tokens

    def result(self) -> str | None:
        """Return the next piece; empty text once there will be no more, None while there is none yet."""
        text = self._track.text
        if text.num_tokens > self._num_read:
            self._num_read = text.num_tokens
            settled = text.settled
            if len(settled) > self._num_sent:
                piece, self._num_sent = settled[self._num_sent :], len(settled)
                return piece
        return None if self.leaves and self.leaves[0].alive else ""


class Piece(Operation[str]):
    """The next piece of a stream; empty at its end."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __await__(self) -> Generator[Operation[str], str, str]:
        """Wait for the piece, as a step of a loop: behind the last one the loop ends."""
        if piece := (yield self):
            return piece
        raise StopAsyncIteration

    def __str__(self) -> str:
        return f"streaming branch {self.stream.branch.path}"

    def run(self, task: Task, limits: Limits) -> StreamRun:
        """Return the run of the whole stream, to go on on behalf of `task`."""
        stream = self.stream
        if stream.run is None:
            stream.run = StreamRun(task, generate([stream.branch], stream.params), limits)
        stream.branch.end()
        stream.run.task = task
        return stream.run


class Stream:
    """An asynchronous iterator over the text of one branch; see `stream`.

    Attributes
    ----------
    branch : Branch
    params : SamplingParams
    run : StreamRun or None
        None before the first piece.
    """

    def __init__(self, branch: Branch, params: SamplingParams) -> None:
        generate([branch], params)  # to refuse what it refuses
        self.branch = branch
        self.params = params
        self.run: StreamRun | None = None
        self._piece = Piece(self)

    def __aiter__(self) -> Stream:
        return self

    def __anext__(self) -> Piece:
        """Decode until there is a piece."""
        return self._piece


def stream(branch: Branch, params: SamplingParams | None = None) -> Stream:
    """Let `branch` go on as `generate` does, and give its text as it comes: ``async for piece in stream(branch)``.

    The pieces join to the text that the branch gains. Nothing that belongs to a stop string, or may yet, is among them.
    The branch decodes only while the program waits for a piece: a loop that is left early leaves the branch as long as
    it is then, ready to be forked, pruned or decoded again.

    Raises
    ------
    ValueError
        If ``params.n`` is not 1.
    DeadBranchError
        If the branch is no longer alive, here or when a piece is asked for.
    """
    return Stream(branch, SamplingParams() if params is None else params)

"""The user's cache folder: finished things under their final name only, progress on anything long."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from treewise.config import cache_folder

BLOCK = 1 << 22


def make_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Make a file or folder unless it is there, so that it is never seen half made.

    Parameters
    ----------
    target : Path
        Where it belongs. What is there is taken as finished.
    make : callable
        Makes it at the temporary path it is given, on the same file system. If it raises, nothing is left behind.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=target.parent) as scratch:
        made = Path(scratch) / target.name
        make(made)
        try:
            os.replace(made, target)
        except OSError:
            # Another process has finished a folder there in the meantime; the two are the same.
            if not target.exists():
                raise
    return target


def sha256(path: Path, description: str) -> str:
    """Compute the checksum of a file's contents, showing progress."""
    digest = hashlib.sha256()
    with progress(description, path.stat().st_size) as advance, open(path, "rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
            advance(len(block))
    return digest.hexdigest()


def remembered_sha256(path: Path) -> str:
    """Give the checksum of a file's contents, computed again only when the file has changed.

    The file's change time is part of what is compared, and no ordinary write leaves that as it was.
    """
    path = path.resolve()
    stat = path.stat()
    fingerprint = repr((str(path), stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
    name = hashlib.sha256(fingerprint.encode()).hexdigest()

    def write(note: Path) -> None:
        note.write_text(sha256(path, f"Reading {path.name}"), "ascii")

    return make_once(cache_folder() / "checksums" / name, write).read_text("ascii")


def check_space(folder: Path, needed: int, what: str) -> None:
    """Refuse to begin something that the disk has no room for.

    Raises
    ------
    OSError
        Fewer than ``needed`` bytes are free.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(f"{what} needs {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free")


@contextmanager
def progress(description: str, total: float) -> Iterator[Callable[[float], None]]:
    """Show a progress bar on the error stream while the block runs; the block calls what it is given to advance."""
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    # On a terminal the bar is gone when it is done; in a log, one line of it stays.
    with Progress(*columns, console=console, transient=console.is_terminal) as bars:
        task = bars.add_task(description, total=total)
        yield lambda amount: bars.advance(task, amount)

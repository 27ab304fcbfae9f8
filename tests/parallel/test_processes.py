"""Ranks as processes: how they start, and that they end whatever happens."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import treewise
from treewise import SamplingParams
from treewise.bench.subject import Subject
from treewise.bench.tree import tree
from treewise.llm import LLM
from treewise.models import load_decoder
from treewise.models.shapes import NumberTokenizer
from treewise.parallel import RankLost, load
from treewise.parallel.group import Group
from treewise.parallel.ranks import Processes, Ranks

GREEDY = SamplingParams(temperature=0, max_tokens=8)
PROMPTS = [" 1 2 3 4 5", " 9 8 7"]
SCRIPT = """
import os, sys
from treewise import SamplingParams
from treewise.llm import LLM
from treewise.models.shapes import NumberTokenizer
from treewise.parallel import load

model = load("shape:tiny", 2)
llm = LLM(model, tokenizer=NumberTokenizer(256), device="cpu", num_kv_slots=512)
outputs = llm.generate([" 1 2 3 4 5", " 9 8 7"], SamplingParams(temperature=0, max_tokens=8))
print("tokens", [output.outputs[0].token_ids for output in outputs], flush=True)
"""
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(treewise.__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def engine(model):
    return LLM(model, tokenizer=NumberTokenizer(256), device="cpu", num_kv_slots=512)


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


def is_there(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module")
def expected():
    return tokens(engine(load_decoder("shape:tiny")))


def test_ranks_end_with_the_model(expected):
    threads = torch.get_num_threads()
    model = load("shape:tiny", 2)
    [other] = model.ranks._processes._processes.values()
    llm = engine(model)
    assert tokens(llm) == expected
    assert other.poll() is None
    del llm, model
    gc.collect()
    assert other.wait(timeout=10) == 0
    assert torch.get_num_threads() == threads


def test_a_rank_that_was_killed_is_an_error_of_the_step_and_of_all_to_come(expected):
    model = load("shape:tiny", 4)
    first, second, third = model.ranks._processes._processes.values()
    llm = engine(model)
    assert tokens(llm) == expected
    os.kill(second.pid, signal.SIGKILL)
    second.wait()
    for _ in range(2):
        with pytest.raises(RankLost, match=r"rank 2 was ended by SIGKILL.*loaded again"):
            llm.generate(PROMPTS, GREEDY)
    assert first.poll() is not None and third.poll() is not None


def test_an_error_between_what_ranks_do_together_ends_them(monkeypatch):
    """Rank 0 alone fails: the other waits for it in the middle of the forward, and nobody is to wait for ever."""
    model = load("shape:tiny", 2)
    [other] = model.ranks._processes._processes.values()
    llm = engine(model)
    monkeypatch.setattr(model, "project", lambda hidden: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    with pytest.raises(RankLost, match="ZeroDivisionError came up between"):
        llm.generate(PROMPTS, GREEDY)
    assert other.wait(timeout=10) == 0


def test_an_interrupt_comes_behind_the_forward_that_it_came_in(monkeypatch, expected):
    model = load("shape:tiny", 2)
    llm, project = engine(model), model.project

    def interrupted(hidden):
        os.kill(os.getpid(), signal.SIGINT)
        return project(hidden)

    monkeypatch.setattr(model, "project", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert tokens(llm) == expected
    llm.engine.check_integrity()


def test_what_went_wrong_on_another_rank_is_told(tmp_path):
    processes = Processes(2, "cpu", str(tmp_path), "auto")
    group = Group(processes.store, 0, 2, torch.device("cpu"), is_local=True)
    ranks = Ranks(group, processes)
    told = r"(?s)rank 1 ended with exit code 1.*FileNotFoundError.*no config\.json"
    with pytest.raises(RankLost, match=told), ranks.together():
        group.total(0)


@pytest.mark.parametrize("is_killed", [False, True])
def test_no_rank_outlives_the_process_that_started_it(is_killed, expected):
    """Nor does it run the script of its parent again, which has no guard against that."""
    script = SCRIPT + "print(model.ranks._processes._processes[1].pid, flush=True)\n"
    if is_killed:
        script += "import time; time.sleep(60)\n"
    with subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT, text=True
    ) as parent:
        parent.stdin.write(script)
        parent.stdin.close()
        assert parent.stdout.readline() == f"tokens {expected}\n"
        other = int(parent.stdout.readline())
        if is_killed:
            assert is_there(other)
            parent.kill()
        assert parent.wait(timeout=60) == (-signal.SIGKILL if is_killed else 0)
    assert wait_until(lambda: not is_there(other))


def test_under_torchrun_one_process_goes_on_and_the_others_follow(tmp_path, expected):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"tokens {expected}"]  # once


def test_torchrun_has_to_start_as_many(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="tensor_parallel_size is 2, but torchrun has started 4 processes"):
        load("shape:tiny", 2)


def test_devices_and_sizes_are_checked_before_anything_starts(monkeypatch):
    with pytest.raises(ValueError, match=r"tensor_parallel_size is 3;.*over 1, 2, 4 ranks"):
        LLM("shape:tiny", tensor_parallel_size=3, device="cpu")
    with pytest.raises(ValueError, match=r"device: cuda:1 is one, and each rank has its own; give 'cuda'"):
        load("shape:tiny", 2, device="cuda:1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="tensor_parallel_size: 2 ranks need a GPU each; there are 1"):
        load("shape:tiny", 2, device="cuda")


def test_benchmarks_run_on_ranks(tmp_path):
    report = tmp_path / "report.json"
    tree(
        subject=Subject("shape:tiny", tensor_parallel_size=2),
        attention="deft:flatten,radix",
        prompt_tokens=20,
        branches=3,
        new_tokens=4,
        repeats=1,
        json_file=report,
    )
    assert '"tensor_parallel_size": 2' in report.read_text()


@pytest.mark.slow
def test_a_real_model_on_three_ranks():
    command = [sys.executable, "-m", "treewise", "generate", "The capital of France is", "--device", "cpu"]
    command += ["--max-tokens", "12", "--temperature", "0"]
    one, three = (
        subprocess.run([*command, *more], env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=True)
        for more in ([], ["--tensor-parallel-size", "3"])
    )
    assert one.stdout == three.stdout and "Paris" in one.stdout

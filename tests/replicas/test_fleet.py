"""Programs on replicas: their results, their errors, and what becomes of both when replicas die."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest
from fleets import TINY

from treewise import LLM, SamplingParams, generate
from treewise.budgets import BudgetExceeded
from treewise.replicas.settings import FleetOptions
from treewise.results import CompletionOutput, ProgramOutput
from treewise.server.driver import Refused
from treewise.server.settings import ServerOptions

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
PARAMS = SamplingParams(max_tokens=60, ignore_eos=True)


# Replicas need not be able to import this file: what is defined in a function goes to them as it is.
def programs():
    from treewise import SamplingParams
    from treewise.budgets import BudgetExceeded

    async def sample(root, n=3, tokens=60):
        return await generate(root.fork(n), SamplingParams(max_tokens=tokens, ignore_eos=True))

    async def talk(root):
        root.message("user", "and then?")
        [answer] = await generate([root], SamplingParams(max_tokens=5, ignore_eos=True))
        return answer

    async def overspend(root):
        await generate(root.fork(2), SamplingParams(max_tokens=4, ignore_eos=True))
        raise BudgetExceeded("tokens", 3, 4, "a part", "it waits")

    async def hide(root):
        return threading.Lock()

    async def end_the_process(root):
        os._exit(1)

    return sample, talk, overspend, hide, end_the_process


SAMPLE, TALK, OVERSPEND, HIDE, END = programs()


def fleet_of(folder, size=2, limits=None, **options):
    from treewise.replicas.fleet import Fleet

    llm = {"model": str(folder), **TINY}
    options = {"cpus_per_replica": 1, **options}
    return Fleet(llm, FleetOptions(data_parallel_size=size, **options), limits)


@pytest.fixture
def by_value():
    """What this file defines goes to replicas as it is."""
    cloudpickle = pytest.importorskip("cloudpickle")
    module = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(module)
    yield
    cloudpickle.unregister_pickle_by_value(module)


async def test_a_program_returns_what_it_returns_here(cluster, tiny_folder, by_value):
    llm = LLM(str(tiny_folder), **TINY)
    async with fleet_of(tiny_folder) as fleet:
        [expected] = llm.run(SAMPLE, "hello", seed=3)
        outputs = await asyncio.gather(*(fleet.run(SAMPLE, "hello", seed=3) for _ in range(4)))
        for output in outputs:
            assert isinstance(output, ProgramOutput)
            assert [node.token_ids for node in output.tree.nodes] == [node.token_ids for node in expected.tree.nodes]
            assert all(isinstance(branch, CompletionOutput) for branch in output.value)
            assert [branch.text for branch in output.value] == [branch.text for branch in expected.value]
            assert output.best.token_ids == expected.best.token_ids and output.tree.strategy == "sample"
        assert len((await fleet.run(SAMPLE, [1, 2, 3], n=2, tokens=4)).value) == 2
        turns = [{"role": "user", "content": "hello"}]
        [there], here = llm.run(TALK, [turns], seed=1), await fleet.run(TALK, turns, seed=1)
        assert here.value.text == there.best.text

        # Errors arrive as they were raised, and nothing is tried again.
        with pytest.raises(BudgetExceeded, match="a part has used 4 of its 3") as caught:
            await fleet.run(OVERSPEND, "x")
        assert (caught.value.resource, caught.value.limit) == ("tokens", 3)
        with pytest.raises(ValueError, match="prompt"):
            await fleet.run(SAMPLE, "")
        with pytest.raises(BudgetExceeded):
            await fleet.run(SAMPLE, "x", token_budget=5)
        with pytest.raises(TypeError, match="cannot leave the replica"):
            await fleet.run(HIDE, "x")
        with pytest.raises(ValueError, match="no-such"):
            await fleet.run(SAMPLE, "x", kv_sparsity="no-such")
        assert fleet.num_resent == fleet.num_lost == fleet.num_open == 0

        # What a killed replica worked on is done elsewhere, with the same result.
        [expected] = llm.run(SAMPLE, "hello", seed=9, tokens=200)
        tasks = [asyncio.create_task(fleet.run(SAMPLE, "hello", seed=9, tokens=200)) for _ in range(4)]
        await asyncio.sleep(0.3)
        os.kill(fleet.members[0].facts.process_id, 9)
        for output in await asyncio.gather(*tasks):
            assert [branch.text for branch in output.value] == [branch.text for branch in expected.value]
        assert fleet.num_lost == 1

        # One whose caller goes is ended.
        task = asyncio.create_task(fleet.run(SAMPLE, "hello", tokens=3000))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert fleet.num_open == 0 and not any(member.calls for member in fleet.members)


async def test_a_program_that_kills_replicas_is_given_up(cluster, tiny_folder, by_value):
    from treewise.replicas.fleet import ReplicaLost

    limits = ServerOptions(max_running=1, max_waiting=0)
    async with fleet_of(tiny_folder, size=1, max_attempts=2, limits=limits) as fleet:
        with pytest.raises(ReplicaLost, match="2 replicas were lost over the request"):
            await fleet.run(END, "x")
        assert fleet.num_lost == 2 or fleet.num_resent == 2
        # Meanwhile others may come, as many as there is room for; they wait for the next replica.
        one = asyncio.create_task(fleet.run(SAMPLE, "x"))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as caught:
            await fleet.run(SAMPLE, "x")
        assert caught.value.reason == "queue_full"
        assert len((await one).value) == 3


async def test_what_cannot_be_started_says_why(cluster, tiny_folder):
    fleet = fleet_of(tiny_folder)
    fleet.llm["max_model_len"] = 1 << 20
    with pytest.raises(ValueError, match="max_model_len"):
        async with fleet:
            pass
    with pytest.raises(FileNotFoundError, match="no-such-model"):
        async with fleet_of("no-such-model", size=1):
            pass


async def test_there_must_be_room(cluster, tiny_folder, monkeypatch):
    monkeypatch.setattr("treewise.replicas.fleet.ROOM_SECONDS", 1)
    with pytest.raises(ValueError, match=r"no room for 2 replicas that take \{'CPU': 99\}"):
        async with fleet_of(tiny_folder, cpus_per_replica=99):
            pass


def test_without_ray_it_says_how_to_get_it(tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('no ray here')")
    done = subprocess.run(
        [sys.executable, "-m", "treewise", "serve", "--data-parallel-size", "2", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 2 and "pip install 'treewise[ray]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1

"""Simulated replicas: nothing is lost or made up; times are those of closed forms and of measured runs."""

from __future__ import annotations

import json
from dataclasses import astuple
from math import ceil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewise.cli import main
from treewise.replicas.calibration import H200, calibrate
from treewise.replicas.comparison import compare
from treewise.replicas.routing import PrefixRouter, RoundRobin
from treewise.replicas.simulation import BLOCK_TOKENS, SimulatedReplica, StepCosts, Turn, simulate
from treewise.replicas.traces import TRACES, find_trace

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
FILES = [RESULTS / "engine_h200.json", RESULTS / "serve_h200.json"]
ROUTERS = {"prefix": PrefixRouter, "round_robin": RoundRobin}


def replicas_of(count, pool_tokens, max_num_rows=512, costs=H200):
    return [SimulatedReplica(str(place), costs, pool_tokens, max_num_rows) for place in range(count)]


def fresh(number, length):
    return (range(number << 20, (number << 20) + length),)


@pytest.mark.parametrize(("prompt", "branches", "new"), [(1, 1, 1), (100, 1, 50), (1000, 4, 30), (1030, 7, 2)])
def test_one_request_takes_what_its_steps_take(prompt, branches, new):
    [replica] = there = replicas_of(1, 100_000)
    outcome = simulate([[Turn(fresh(0, prompt), branches, new)]], RoundRobin(), there, 1)
    chunks = ceil(prompt / 512)
    tokens = chunks * prompt + sum(prompt + branches * decoded for decoded in range(1, new))
    steps = chunks + new - 1
    assert replica.done == [steps, branches * (new - 1), tokens, prompt]
    assert outcome.seconds == pytest.approx(H200.seconds(steps, branches * (new - 1), tokens, prompt))
    assert outcome.jobs[0].first == pytest.approx(H200.seconds(chunks, 0, chunks * prompt, prompt))


def test_equal_requests_side_by_side_take_what_a_batch_takes():
    count, prompt, new = 8, 60, 20
    [replica] = there = replicas_of(1, 100_000)
    sessions = [[Turn(fresh(number, prompt), new_tokens=new)] for number in range(count)]
    outcome = simulate(sessions, RoundRobin(), there, count)
    # The first is alone in the first step, in which the others come; the second step has the prompts of all others.
    first = H200.seconds(1, 0, prompt, prompt)
    second = H200.seconds(1, 1, count * prompt + 1, (count - 1) * prompt)
    later = [(count, count * prompt + 2 + (count - 1) + count * step) for step in range(new - 2)]
    last = (count - 1, (count - 1) * prompt + (count - 1) * (new - 1))
    expected = first + second + sum(H200.seconds(1, rows, tokens, 0) for rows, tokens in [*later, last])
    assert outcome.seconds == pytest.approx(expected)
    assert replica.done[1] == count * (new - 1) and replica.done[3] == count * prompt
    assert replica.busy == pytest.approx(outcome.seconds)


def test_what_is_shared_is_computed_and_read_once():
    [replica] = there = replicas_of(1, 100_000)
    shared = fresh(0, 128)
    sessions = [[Turn((*shared, *fresh(number + 1, 8)), new_tokens=4)] for number in range(5)]
    outcome = simulate(sessions, RoundRobin(), there, 5)
    assert replica.done[3] == 128 + 5 * 8
    assert sorted(job.matched for job in outcome.jobs) == [0, 128, 128, 128, 128]
    # Steps read the prefix once, and of each request that is there what it has alone.
    assert replica.done[2] <= replica.done[0] * 128 + 5 * 4 * (8 + 4)
    assert replica.stretch is None and not replica.held and len(replica.cached) == 2


def test_a_chat_finds_what_was_said():
    there = replicas_of(1, 100_000)
    session = [Turn(fresh(turn, 96), new_tokens=32, pause=float(turn)) for turn in range(4)]
    outcome = simulate([session], PrefixRouter(), there, 1)
    assert [job.prompt_tokens for job in outcome.jobs] == [96, 224, 352, 480]
    assert [job.matched for job in outcome.jobs] == [0, 128, 256, 384]
    ended = [job.ended for job in outcome.jobs]
    arrived = [job.arrived for job in outcome.jobs]
    assert [later - before for later, before in zip(arrived[1:], ended, strict=False)] == pytest.approx([1, 2, 3])


@st.composite
def loads(draw):
    sessions = []
    for number in range(draw(st.integers(1, 25))):
        turns = []
        for turn in range(draw(st.integers(1, 3))):
            shared = fresh(draw(st.integers(0, 3)), draw(st.integers(0, 300))) if turn == 0 else ()
            own = fresh(100 + number * 4 + turn, draw(st.integers(1, 40)))
            pause = draw(st.floats(0, 0.2)) if turn else 0.0
            turns.append(Turn((*shared, *own), draw(st.integers(1, 4)), draw(st.integers(1, 20)), pause))
        sessions.append(turns)
    return sessions


class Watched(SimulatedReplica):
    """Checks itself after every step."""

    def finish(self):
        ended = super().finish()
        assert self.num_blocks <= self.pool_tokens // BLOCK_TOKENS
        assert not self.held.keys() & self.cached.keys()
        assert self.own == sum(each.job.own_blocks for each in self.running)
        assert sum(self.held.values()) == sum(len(each.job.blocks) for each in self.running)
        assert sum(each.job.branches for each in self.running) <= self.max_num_rows
        assert self.stretch is not None or not (self.running or self.waiting)
        return ended


@settings(max_examples=150, deadline=None)
@given(loads(), st.integers(1, 4), st.integers(1, 12), st.integers(14, 60), st.sampled_from(sorted(ROUTERS)))
def test_nothing_is_lost_or_made_up(sessions, count, clients, pool_blocks, kind):
    there = [Watched(str(place), H200, pool_blocks * BLOCK_TOKENS, 64) for place in range(count)]
    router = ROUTERS[kind]()
    outcome = simulate(sessions, router, there, clients)
    turns = {(session, turn) for session, asked in enumerate(sessions) for turn in range(len(asked))}
    assert {(job.session, job.turn) for job in outcome.jobs} == turns and len(outcome.jobs) == len(turns)
    for job in outcome.jobs:
        assert job.arrived < job.first <= job.ended <= outcome.seconds
        assert 0 <= job.matched < job.prompt_tokens
    # Every row was computed somewhere, each in a step that was counted.
    assert sum(replica.done[3] for replica in there) == sum(job.prompt_tokens - job.matched for job in outcome.jobs)
    decoded = sum(job.branches * (job.new_tokens - 1) for job in outcome.jobs)
    assert sum(replica.done[1] for replica in there) == decoded
    for replica in there:
        assert replica.busy == pytest.approx(H200.seconds(*replica.done)) and replica.busy <= outcome.seconds + 1e-9
        assert not (replica.running or replica.waiting or replica.held or replica.own)
    if kind == "prefix":
        assert [router.load(name) for name in router.names] == [0] * count
    starts = sorted(job.arrived for job in outcome.jobs if job.turn == 0)
    assert starts[: min(clients, len(sessions))] == [0.0] * min(clients, len(sessions))


@settings(max_examples=20, deadline=None)
@given(loads(), st.integers(1, 6))
def test_one_replica_is_the_same_behind_every_router(sessions, clients):
    found = [simulate(sessions, router(), replicas_of(1, 20_000), clients) for router in ROUTERS.values()]
    assert found[0].seconds == found[1].seconds
    assert [(job.session, job.turn, job.ended) for job in found[0].jobs] == [
        (job.session, job.turn, job.ended) for job in found[1].jobs
    ]


def test_a_request_that_never_fits_is_refused():
    with pytest.raises(ValueError, match="pool_tokens: 192 are no room for 320"):
        simulate([[Turn(fresh(0, 200), new_tokens=16)]], RoundRobin(), replicas_of(1, 192), 1)
    with pytest.raises(ValueError, match="max_num_rows: 4 are no room for 5 branches"):
        simulate([[Turn(fresh(0, 16), branches=5)]], RoundRobin(), replicas_of(1, 16_000, max_num_rows=4), 1)


def test_costs_are_those_of_the_measured_files():
    found = calibrate(FILES, "shape:llama-3-8b")
    assert found.costs == H200 and found.device == "NVIDIA H200"
    assert found.measured == 56 and found.errors["p50"] < 0.07 and found.errors["p90"] < 0.2
    # Runs that nothing was fitted to: an ample pool to some percent, a short one within an eighth.
    errors = {load["pool_tokens"]: load["error"] for load in found.loads}
    assert abs(errors[100_000]) < 0.03 and abs(errors[31_000]) < 0.125
    for load in found.loads:
        assert load["simulated_ttft_s"] == pytest.approx(load["measured_ttft_s"], rel=0.06)


def test_known_costs_are_found_again(tmp_path):
    costs = StepCosts(2e-3, 3e-5, 4e-8, 5e-5)
    runs = []
    for prompt, branches, new in ((100, 1, 50), (2000, 8, 40), (4000, 32, 30), (300, 64, 20), (9000, 2, 60)):
        [replica] = there = replicas_of(1, 10**6, 1024, costs)
        outcome = simulate([[Turn(fresh(0, prompt), branches, new)]], RoundRobin(), there, 1)
        prefill = outcome.jobs[0].first
        chunks = ceil(prompt / 1024)
        result = {
            "engine": "auto",
            "whole_s": outcome.seconds,
            "prefill_s": prefill,
            "decode_s": outcome.seconds - prefill,
            "steps": new - 1,
            "unique_kv_gb": (replica.done[2] - chunks * prompt) * 131_072 / 1e9,
            "tokens_per_s": branches * new / outcome.seconds,
        }
        facts = {"bench": "tree", "workload": "samples", "model": "shape:llama-3-8b", "dtype": "bfloat16"}
        sizes = {"prompt_tokens": prompt, "branches": branches, "max_num_rows": 1024, "machine": {"device": "made up"}}
        runs.append({**facts, **sizes, "results": [result]})
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": runs}))
    found = calibrate([path], "shape:llama-3-8b")
    assert astuple(found.costs) == pytest.approx(astuple(costs), rel=0.02)
    assert found.errors["max"] < 0.01 and found.device == "made up" and found.loads == []
    path.write_text(json.dumps(runs[0]))
    with pytest.raises(ValueError, match="calibration: four costs need four different times of shape:llama-3-8b"):
        calibrate([path], "shape:llama-3-8b")


def test_affinity_gains_where_one_pool_is_too_small_and_four_are_not(monkeypatch):
    monkeypatch.setattr("treewise.replicas.comparison.FEWEST", 600)
    trace = find_trace("documents:40")
    row = compare(trace, 4, H200, 100_000, 8192, 8, 0)
    assert row["gain"] > 1.5 and row["prefix"]["prefix_hits"] > row["round_robin"]["prefix_hits"] + 0.2
    nothing = compare(find_trace("distinct"), 4, H200, 100_000, 8192, 8, 0)
    assert nothing["gain"] == pytest.approx(1.0, abs=0.1)
    assert nothing["prefix"]["prefix_hits"] == nothing["round_robin"]["prefix_hits"] == 0.0


def test_what_was_simulated_is_told_as_it_is():
    told = json.loads((RESULTS / "replicas_simulated.json").read_text("utf-8"))
    page = (RESULTS.parents[1] / "docs" / "scale.md").read_text("utf-8")
    assert StepCosts(**told["costs"]) == H200
    for name in TRACES:
        rows = [row for row in told["results"] if row["trace"] == name]
        assert [row["replicas"] for row in rows] == [1, 2, 4, 8, 16, 32, 64]
        gains = " | ".join(f"{row['gain']:.2f}" for row in rows)
        assert f"| {gains} |" in page
        assert rows[0]["gain"] == 1.0
        if name == "distinct":  # nothing is shared, so that every replica does the same
            for kind in ROUTERS:
                each = [row[kind]["tokens_per_s"] / row["replicas"] for row in rows]
                assert max(each) < 1.06 * min(each)
    [documents] = [row for row in told["results"] if (row["trace"], row["replicas"]) == ("documents", 4)]
    assert documents["gain"] >= 1.5


@pytest.mark.parametrize("name", sorted(TRACES))
def test_traces_are_the_same_for_the_same_seed(name):
    trace = find_trace(name)
    sessions = trace.sessions(50, seed=1)
    assert sessions == trace.sessions(50, seed=1) != trace.sessions(50, seed=2)
    assert {len(session) for session in sessions} == {trace.turns}
    own = [tokens.start for session in sessions for turn in session for tokens in turn.tokens[-1:]]
    assert len(set(own)) == len(own)
    shared = {session[0].tokens[0].start for session in sessions if len(session[0].tokens) > 1}
    assert len(shared) <= trace.texts and (shared or name == "distinct")
    assert np.mean([turn.new_tokens for session in sessions for turn in session]) > 50


def test_the_verb_writes_table_json_and_picture(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("treewise.replicas.comparison.FEWEST", 60)
    files = ["--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]
    command = ["bench", "replicas", "--trace", "documents:5,distinct", "--replicas", "1,2", "--texts", "4,8"]
    main([*command, "--clients", "4", "--pool-tokens", "50000", *files])
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert [(row["trace"], row["replicas"]) for row in told["results"]] == [
        ("documents:5", 1), ("documents:5", 2), ("distinct", 1), ("distinct", 2), ("documents:4", 4), ("documents:8", 4)
    ]  # fmt: skip
    assert told["results"][0]["gain"] == 1.0
    assert json.loads((tmp_path / "r.json").read_text("utf-8")) == told
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "hits by turns" in printed.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--trace letters", "trace: 'letters' is not one of documents, chats, tree-programs, system-prompts, distinct"),
        ("--trace documents:many", "is not of the form documents:NUMBER"),
        ("--trace documents:0", "the number of texts must be"),
        ("--replicas 1,none", "replicas: 'none' is no number from 1 on"),
        ("--clients 0", "clients must be an integer"),
        ("--trace distinct --replicas 1 --pool-tokens 64", "pool_tokens: 64 are no room"),
        ("--calibration nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["bench", "replicas", *flags.split()])
    printed = capsys.readouterr()
    assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1

"""One program over many prompts: order, seeds, errors, and files that a later run goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import idle, tiny_llm, tiny_model

from treewise.awaitables import generate
from treewise.config import SamplingParams
from treewise.replicas import map_programs
from treewise.replicas.mapping import digest
from treewise.results import Tree
from treewise.sampler import row_key
from treewise.search import rollouts

MODEL = tiny_model()
PROMPTS = ["one", "two, which is longer", "three", "four and five", "six"]


def llm_here(**options):
    return tiny_llm(MODEL, **options)


async def lengths(root, scale=1):
    """Decode more tokens the shorter the prompt, so that later prompts end before earlier ones."""
    [branch] = await generate(root.fork(), SamplingParams(max_tokens=scale * (24 - root.num_tokens), ignore_eos=True))
    return {"tokens": branch.token_ids}


async def picky(root):
    if root.num_tokens == len("three"):
        raise KeyError("a fault of its own")
    return await lengths(root)


def one_by_one(llm):
    runs = (llm.run(lengths, [prompt], seed=row_key(7, (i,))) for i, prompt in enumerate(PROMPTS))
    return [output.value for [output] in runs]


def values(results):
    return [result.value for result in results]


@pytest.mark.parametrize("in_flight", [1, 2, 64])
def test_results_are_those_of_each_prompt_alone_in_the_order_of_the_prompts(in_flight):
    llm = llm_here()
    alone = one_by_one(llm)
    found = list(map_programs(lengths, PROMPTS, llm, seed=7, in_flight=in_flight))
    assert values(found) == alone
    assert [result.index for result in found] == list(range(len(PROMPTS)))
    assert all(result.usage.completion_tokens == len(result.value["tokens"]) for result in found)
    idle(llm)


def test_results_come_as_programs_end_where_order_does_not_matter():
    llm = llm_here()
    found = list(map_programs(lengths, PROMPTS, llm, ordered=False, seed=7))
    assert [result.index for result in found] == sorted(range(len(PROMPTS)), key=lambda i: -len(PROMPTS[i]))
    in_order = list(map_programs(lengths, PROMPTS, llm, seed=7))
    assert values(sorted(found, key=lambda result: result.index)) == values(in_order)
    assert values(map_programs(lengths, PROMPTS, llm, seed=8)) != values(in_order)


def test_no_more_programs_are_under_way_than_may_be():
    llm = llm_here()
    seen = []

    async def watched(root):
        for _ in range(3):
            await generate([root], SamplingParams(max_tokens=1, ignore_eos=True))
            seen.append(len(llm.engine.requests))

    assert len(list(map_programs(watched, ["x"] * 7, llm, in_flight=3))) == 7
    assert max(seen) == 3


def test_an_iteration_that_is_left_ends_what_is_under_way():
    llm = llm_here()
    results = map_programs(lengths, PROMPTS, llm, ordered=False)
    next(results)
    assert llm.engine.requests
    results.close()
    idle(llm)


def test_an_error_is_its_prompt_s_alone(tmp_path):
    llm = llm_here()
    prompts = [*PROMPTS, "", [500]]  # the last two cannot be started
    found = list(map_programs(picky, prompts, llm, errors="keep", seed=7, output=tmp_path / "out.jsonl"))
    failed = [result.index for result in found if result.error is not None]
    assert failed == [2, 5, 6]
    assert found[2].error == "KeyError: 'a fault of its own'" and found[2].value is None
    assert found[5].error.startswith("ValueError: prompt:")
    alone = one_by_one(llm)
    assert [found[i].value for i in (0, 1, 3, 4)] == [alone[i] for i in (0, 1, 3, 4)]
    idle(llm)


def test_an_error_can_end_it_all_and_names_the_prompt(tmp_path):
    llm = llm_here()
    path = tmp_path / "out.jsonl"
    with pytest.raises(KeyError, match="a fault of its own") as caught:
        list(map_programs(picky, PROMPTS, llm, output=path))
    assert caught.value.__notes__[-1] == "prompts[2]"
    idle(llm)
    # What had ended before is there, and the error is not: the prompt is tried again.
    assert all("error" not in json.loads(line) for line in path.read_text("utf-8").splitlines())
    kept = list(map_programs(picky, PROMPTS, llm, output=path, errors="keep"))
    assert [result.error is None for result in kept] == [True, True, False, True, True]
    assert list(map_programs(picky, PROMPTS, llm, output=path, errors="keep")) == kept
    with pytest.raises(KeyError):
        list(map_programs(picky, PROMPTS, llm, output=path))


def test_what_a_program_returns_must_be_what_json_holds():
    [result] = map_programs(value_of, ["x"], llm_here(), what=object, errors="keep")
    assert "value: what the program returned cannot be written as JSON" in result.error
    [result] = map_programs(value_of, ["x"], llm_here(), what=partial(dict, a=(1, float("inf"))))
    assert result.value == {"a": [1, "Infinity"]}


async def value_of(root, what):
    return what()


def test_branches_trees_and_rollouts_are_written(tmp_path):
    llm, path = llm_here(), tmp_path / "out.jsonl"

    async def several(root):
        return await generate(root.fork(3), SamplingParams(max_tokens=4, ignore_eos=True, logprobs=1))

    [found] = map_programs(several, ["x"], llm, trees=True, output=path)
    [alone] = llm.run(several, ["x"], seed=row_key(0, (0,)))
    assert [branch["token_ids"] for branch in found.value] == [branch.token_ids for branch in alone.outputs]
    assert found.tree.nodes == alone.tree.nodes and isinstance(found.tree, Tree)
    assert list(map_programs(several, ["x"], llm, trees=True, output=path)) == [found]

    settings_of = {"widths": (2, 2), "at": (2,), "max_tokens": 5}
    [found] = map_programs(rollouts, ["x"], llm, **settings_of)
    [alone] = llm.run(rollouts, ["x"], seed=row_key(0, (0,)), **settings_of)
    assert found.value == [asdict(trajectory) for trajectory in alone.value]


def test_a_file_is_gone_on_from(tmp_path):
    llm, path = llm_here(), tmp_path / "out.jsonl"
    results = map_programs(lengths, PROMPTS, llm, output=path, ordered=False)
    first = [next(results), next(results)]
    results.close()
    assert [json.loads(line)["index"] for line in path.read_text("utf-8").splitlines()] == [
        result.index for result in first
    ]
    steps = llm.engine.num_steps
    again = list(map_programs(lengths, PROMPTS, llm, output=path))
    assert llm.engine.num_steps > steps
    assert values(again) == values(map_programs(lengths, PROMPTS, llm_here()))
    steps = llm.engine.num_steps
    assert list(map_programs(lengths, PROMPTS, llm, output=path)) == again
    assert llm.engine.num_steps == steps


WHOLE: list[bytes] = []


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_a_run_that_is_killed_at_any_byte_is_gone_on_from(tmp_path_factory, data):
    llm, path = llm_here(), tmp_path_factory.mktemp("killed") / "out.jsonl"
    if not WHOLE:
        list(map_programs(lengths, PROMPTS, llm, output=path))
        WHOLE.append(path.read_bytes())
    [whole] = WHOLE
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    steps = llm.engine.num_steps
    results = list(map_programs(lengths, PROMPTS, llm, output=path, in_flight=data.draw(st.integers(1, 6))))
    assert [result.index for result in results] == list(range(len(PROMPTS)))
    lines = path.read_bytes().splitlines(keepends=True)
    assert lines[: whole[:cut].count(b"\n")] == whole.splitlines(keepends=True)[: whole[:cut].count(b"\n")]
    by_index = {json.loads(line)["index"]: json.loads(line)["value"] for line in lines}
    assert len(lines) == len(by_index) == len(PROMPTS)
    assert by_index == {record["index"]: record["value"] for record in map(json.loads, whole.splitlines())}
    assert values(results) == [by_index[index] for index in range(len(PROMPTS))]
    assert (llm.engine.num_steps > steps) == (cut < len(whole))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seed": 1}, "line 1 of .* is of other work: for prompt"),
        ({"scale": 2}, "is of other work"),
        ({"program": picky, "scale": None}, "is of other work"),
        ({"trees": True}, "is of other work"),
        ({"prompts": [*PROMPTS[:3], "nine", "six"]}, "is of other work: for prompt 3"),
        ({"prompts": PROMPTS[:2]}, "and there are 2"),
        ({"model_name": "another"}, "is of other work"),
    ],
)
def test_a_file_of_other_work_is_refused_and_left_alone(tmp_path, changes, expected):
    llm, path = llm_here(), tmp_path / "out.jsonl"
    arguments = {"program": lengths, "prompts": PROMPTS, "engines": llm, "output": path, "seed": 0, "scale": 1}
    list(map_programs(**arguments))
    before = path.read_bytes()
    path.write_bytes(before[:-3])
    llm.model_name = changes.pop("model_name", llm.model_name)
    arguments = {name: value for name, value in (arguments | changes).items() if value is not None}
    with pytest.raises(ValueError, match=expected):
        map_programs(**arguments)
    assert path.read_bytes() == before[:-3]


@pytest.mark.parametrize(
    "text", ["my notes", "my notes\n", '{"index": 0}\n', "[]\n", "\xff\xfe\n", '{"index": "x", "digest": ""}\n']
)
def test_a_file_that_is_no_file_of_results_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"output: line 1 of .*notes\.txt is no result; name another file"):
        map_programs(lengths, PROMPTS, llm_here(), output=path)
    assert path.read_text("utf-8") == text


def test_options_are_checked_at_once():
    llm = llm_here()
    with pytest.raises(ValueError, match="in_flight must be an integer"):
        map_programs(lengths, PROMPTS, llm, in_flight=0)
    with pytest.raises(ValueError, match="errors: 'ignore' is not one of raise, keep"):
        map_programs(lengths, PROMPTS, llm, errors="ignore")
    with pytest.raises(ValueError, match="prompts: give a list of prompts"):
        map_programs(lengths, "one", llm)


def test_digests_tell_work_from_other_work(tmp_path):
    def program(root, n):
        return n

    def other(root, n):
        return n + 1

    work = [
        (program, {"a": 1, "b": {2, 3}}),
        (other, {"a": 1, "b": {2, 3}}),
        (program, {"a": 1.5}),
        (Path, 1),
        (b"", 1),
    ]
    work += [(partial(program, n=1), {}), (partial(program, n=2), {}), (SamplingParams(n=2), 0), (SamplingParams(), 0)]
    assert len({digest(*each) for each in work}) == len(work)
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest(np.arange(5000)) == digest(list(range(5000)))
    assert digest(np.arange(5000)) != digest(np.arange(5000) * (np.arange(5000) != 2500))
    with pytest.raises(ValueError, match="says nothing by which a later run could tell it"):
        digest(object())


def test_a_future_of_another_engine_is_not_waited_for():
    first, second = llm_here(), llm_here()
    future = first.start(lengths, "one", seed=1)
    with pytest.raises(ValueError, match="nothing of what this engine has started"):
        second.wait([future])
    first.wait([future])
    assert len(future.result().value["tokens"]) == 21
    idle(first)

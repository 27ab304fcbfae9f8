"""Searches over HTTP: every strategy, its parameters, its tree while it grows."""

import asyncio

import pytest
from serving import running
from tiny import ChatBytes, tiny_llm

from treewise.search import STRATEGIES

pytestmark = pytest.mark.anyio

THOUGHTS = {"depth": 2, "thought_tokens": 5, "answer_tokens": 4, "temperature": 1.0}
SETTINGS = {
    "best_of_n": {"n": 3, "max_tokens": 8},
    "self_consistency": {"n": 3, "max_tokens": 8, "extract": "line"},
    "beam": {"beam_width": 3, "max_tokens": 6},
    "tot": {"width": 3, "beam": 2, **THOUGHTS},
    "tot_dfs": {"width": 2, "budget": 6, **THOUGHTS},
    "mcts": {"width": 2, "iterations": 4, "parallel": 2, **THOUGHTS},
    "step_beam": {"width": 4, "beam": 2, "allot": "dvts", **THOUGHTS},
    "rollouts": {"widths": [2, 2], "at": [3], "max_tokens": 8},
    "replay": {"recording": [[0, 0, [1, 2]], [1, 4, []], [1, 5, []]]},
}


def offline(name, prompt, seed):
    llm = tiny_llm(codec=ChatBytes())
    [result] = llm.run(STRATEGIES[name].build(**SETTINGS[name]), [prompt], seed=seed)
    return result


async def test_all_strategies_are_listed_with_their_parameters():
    async with running() as server:
        listed = (await server.client.get("/strategies")).json()["strategies"]
    assert [each["name"] for each in listed] == list(STRATEGIES) == list(SETTINGS)
    for each in listed:
        assert each["help"]
        parameters = {parameter["name"]: parameter for parameter in each["parameters"]}
        assert set(SETTINGS[each["name"]]) <= set(parameters)
        for parameter in parameters.values():
            assert set(parameter) == {"name", "type", "default", "choices", "help"} and parameter["help"]
    tot = {parameter["name"]: parameter for parameter in listed[3]["parameters"]}
    assert tot["width"]["type"] == "integer" and tot["width"]["default"] == 3
    assert tot["evaluate"]["choices"] == ["judge", "vote", "logprob"] and tot["evaluate"]["default"] == "judge"
    assert tot["grammar"]["type"] == "object | null"
    assert tot["stop"]["type"] == "string | array"
    assert "reward" not in {parameter["name"] for parameter in listed[7]["parameters"]}


@pytest.mark.parametrize("name", SETTINGS)
async def test_every_strategy_answers_as_it_does_offline(name):
    async with running() as server:
        body = {"prompt": "abc", "search": {"strategy": name, "tree": True, **SETTINGS[name]}, "seed": 11}
        answer = await server.complete(**body)
        [choice] = answer["choices"]
        tree = answer["treewise"]["tree"]
        assert tree["format"] == "treewise.tree" and tree["strategy"] == name
        assert answer["usage"]["completion_tokens"] == tree["usage"]["completion_tokens"] > 0
        assert choice["finish_reason"] in ("stop", "length")
        [(_, job, _)] = server.recorder.of("ended")
        assert job.kind == "search" and job.strategy == name
        if name != "rollouts":
            path, node = [], tree["best"]
            by_id = {each["id"]: each for each in tree["nodes"]}
            while node is not None and by_id[node]["state"] != "prompt":
                path.insert(0, by_id[node]["text"])
                node = by_id[node]["parent"]
            # The line end that has ended a thought is not shown, but the next thought stands behind it.
            assert "".join(path).replace("\n", "") == choice["text"].replace("\n", "")
        await check_stream(server, body, choice["text"])
        await server.idle()


async def check_stream(server, body, text):
    """A streamed search gives the same answer, and nodes that add up to the tree."""
    chunks = await server.chunks(**body, stream_options={"include_usage": True})
    *growing, final, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] > 0
    nodes: dict[int, dict] = {}
    for chunk in growing:
        assert chunk["choices"] == []
        for node in chunk["treewise"]["nodes"]:
            assert set(node) == {"id", "parent", "path", "text", "tokens", "logprob", "score", "state"}
            assert node["state"] in ("live", "pruned", "ended")
            known = nodes.get(node["id"], {"text": "", "parent": node["parent"]})
            assert node["parent"] == known["parent"]
            assert node["parent"] is None or node["parent"] in nodes
            nodes[node["id"]] = node | {"text": known["text"] + node["text"]}
    assert nodes[0]["parent"] is None and nodes[0]["text"] == "" and nodes[0]["tokens"] == 3
    [choice] = final["choices"]
    assert choice["text"] == text and choice["finish_reason"]
    drawn, chosen = final["treewise"]["tree"], final["treewise"]["chosen"]
    assert not any(node["state"] == "live" for node in nodes.values())
    assert sum(node["tokens"] for node in nodes.values()) >= sum(len(node["token_ids"]) for node in drawn["nodes"])
    if chosen is not None:
        assert text.endswith(nodes[chosen]["text"]) and nodes[chosen]["state"] == "ended"


async def test_a_chat_can_search():
    prompt = ChatBytes().apply_chat_template([{"role": "user", "content": "hello"}])
    async with running() as server:
        answer = await server.chat(search={"strategy": "best-of-n", "n": 4}, seed=1, max_tokens=6, temperature=1.0)
        [result] = tiny_llm(codec=ChatBytes()).run(
            STRATEGIES["best_of_n"].build(n=4, max_tokens=6, temperature=1.0),
            [prompt],
            seed=None,
        )
        assert len(answer["choices"][0]["message"]["content"]) == len(result.best.text) == 6
        assert "treewise" not in answer
        answer = await server.chat(search={"strategy": "tot", "depth": 1}, max_completion_tokens=3)
        assert len(answer["choices"][0]["message"]["content"]) > 0


async def test_a_grammar_of_a_search():
    async with running() as server:
        for body in (
            {"search": {"strategy": "best_of_n", "grammar": {"regex": "[0-9]{2}"}}},
            {"search": {"strategy": "best_of_n"}, "guided_regex": "[0-9]{2}"},
        ):
            [choice] = (await server.complete(**body))["choices"]
            assert len(choice["text"]) == 2 and choice["text"].isdigit()


@pytest.mark.parametrize(
    ("message", "search"),
    [
        ("strategy", {}),
        ("strategy", {"strategy": "nonsense"}),
        ("strategy", {"strategy": 5}),
        ("tree", {"strategy": "tot", "tree": "yes"}),
        ("such parameter", {"strategy": "tot", "heads": 3}),
        ("width", {"strategy": "tot", "width": 129}),
        ("width", {"strategy": "tot", "width": 0}),
        ("width", {"strategy": "tot", "width": "3"}),
        ("depth", {"strategy": "tot", "depth": 10**12}),
        ("evaluate", {"strategy": "tot", "evaluate": "os.system"}),
        ("evaluate", {"strategy": "tot", "evaluate": ["judge"]}),
        ("extract", {"strategy": "self_consistency", "extract": []}),
        ("temperature", {"strategy": "best_of_n", "temperature": "hot"}),
        ("n", {"strategy": "best_of_n", "n": 10**6}),
        ("widths", {"strategy": "rollouts", "widths": [100, 100], "at": [3]}),
        ("recording", {"strategy": "replay", "recording": "/etc/passwd"}),
        ("recording", {"strategy": "replay", "recording": [[0, 0, [1]]] * 5000}),
        ("question", {"strategy": "tot", "question": "x" * 10000}),
        ("stop", {"strategy": "best_of_n", "stop": ["x", "y" * 10000]}),
        ("reward", {"strategy": "rollouts", "reward": "x"}),
        ("grammar", {"strategy": "best_of_n", "grammar": {"regex": "("}}),
        ("grammar", {"strategy": "best_of_n", "grammar": "regex:x"}),
    ],
)
async def test_a_bad_search_is_refused(message, search):
    async with running() as server:
        error = await server.error(400, prompt="abc", search=search)
        assert message in error["message"]
        await server.idle()


@pytest.mark.parametrize(
    "field",
    [{"n": 2}, {"logprobs": 1}, {"echo": True}, {"use_beam_search": True}, {"top_k": 3}, {"logit_bias": {"5": 1}}],
)
async def test_what_a_search_cannot_do_is_refused(field):
    async with running() as server:
        error = await server.error(400, prompt="abc", search={"strategy": "best_of_n"}, **field)
        assert error["param"] in field


async def test_a_search_takes_one_prompt():
    async with running() as server:
        for prompts in (["abc", "def"], [[1], [2]]):
            error = await server.error(400, prompt=prompts, search={"strategy": "best_of_n"})
            assert error["param"] == "search" and "one prompt" in error["message"]


async def test_a_search_has_a_budget():
    async with running(max_search_tokens=40) as server:
        error = await server.error(
            400, prompt="abc", search={"strategy": "mcts", "iterations": 10**6, "evaluate": "logprob"}
        )
        assert "40 tokens" in error["message"]
        await server.idle()


async def test_searches_and_completions_side_by_side():
    async with running() as server:
        alone = [await server.complete("abc", search={"strategy": name, **SETTINGS[name]}, seed=3) for name in SETTINGS]
        together = await asyncio.gather(
            *(server.complete("abc", search={"strategy": name, **SETTINGS[name]}, seed=3) for name in SETTINGS),
            *(server.complete("abc", n=3, max_tokens=10) for _ in range(4)),
        )
        for one, other in zip(alone, together, strict=False):
            assert one["choices"] == other["choices"]
        await server.idle()

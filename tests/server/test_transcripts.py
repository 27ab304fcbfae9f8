"""Streams that break off and go on from another replica: the client gets one stream."""

import json
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import running
from tiny import ChatBytes, tiny_llm

from treewise.replicas.transcript import DONE, Interrupted, Parted, Transcript
from treewise.server.responses import to_json


def event(number, *choices, **more):
    return b"data: " + to_json({"id": f"cmpl-{number}", "created": number, "choices": list(choices), **more})


def piece(index, text, tokens=(), finish=None, chat=False):
    said = {"delta": {"content": text} if text else {}} if chat else {"text": text}
    entries = [{"token": token} for token in tokens]
    logprobs = {"content": entries, "refusal": None} if chat else {"tokens": list(tokens), "text_offset": list(tokens)}
    return {"index": index, **said, "logprobs": logprobs if tokens else None, "finish_reason": finish}


def read(events):
    """What a client makes of a stream: by choice the text, the tokens, and how it ended; and the rest."""
    choices, rest = {}, []
    for each in events:
        if each == DONE:
            rest.append("done")
            continue
        chunk = json.loads(each.removeprefix(b"data: "))
        assert chunk["id"] == "cmpl-1" and chunk["created"] == 1
        if chunk.get("usage"):
            rest.append("usage")
        for choice in chunk["choices"]:
            texts, tokens, ends, roles = choices.setdefault(choice["index"], ([], [], [], []))
            said = choice.get("delta", choice)
            texts.append(said.get("content") or said.get("text") or "")
            roles += [said["role"]] if "role" in said else []
            logprobs = choice["logprobs"] or {}
            tokens += [entry["token"] for entry in logprobs.get("content", [])] + logprobs.get("tokens", [])
            ends += [choice["finish_reason"]] * (choice["finish_reason"] is not None)
    return {i: ("".join(texts), *others) for i, (texts, *others) in choices.items()}, rest


@st.composite
def streams(draw):
    """Streams that say the same, cut and ordered otherwise, with the places where all but the last break off."""
    chat = draw(st.booleans())
    texts = draw(st.lists(st.text("abé😀", max_size=8), min_size=1, max_size=3))
    every = []
    for number in range(1, draw(st.integers(2, 4)) + 1):
        queues = []
        for index, text in enumerate(texts):
            cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
            bounds = [0, *cuts, len(text)]
            parts = [text[a:b] for a, b in pairwise(bounds)]
            taken = [0, *accumulate(len(part) for part in parts)]
            queue = [
                piece(index, part, range(taken[i], taken[i + 1]), "stop" if i == len(parts) - 1 else None, chat)
                for i, part in enumerate(parts)
            ]
            opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None}
            queues.append([{**opening, "finish_reason": None}, *queue] if chat else queue)
        events = []
        while any(queues):
            queue = draw(st.sampled_from([queue for queue in queues if queue]))
            events.append(event(number, queue.pop(0)))
        every.append([*events, event(number, usage={"total_tokens": 3}), DONE])
    breaks = [draw(st.integers(0, len(events) - 1)) for events in every[:-1]]
    return every, breaks


@settings(max_examples=150, deadline=None)
@given(streams())
def test_however_streams_are_cut_they_join_to_one(given):
    every, breaks = given
    transcript, told, first = Transcript(), [], None
    for events, end in zip(every, [*breaks, None], strict=True):
        transcript.repeat()
        for each in events[:end]:
            first = first or json.loads(each[6:])["id"]
            told.append(transcript.take(each))
        assert transcript.is_over == (end is None)
    told = [each.replace(first.encode(), b"cmpl-1").replace(b'"created":%b' % first[5:].encode(), b'"created":1')
            for each in told if each is not None]  # fmt: skip
    assert read(told) == read(every[0])


def test_the_first_stream_is_passed_on_as_it_is():
    events = [event(1, piece(0, "ab")), event(1, piece(0, "")), event(1, piece(0, "c", finish="stop")), DONE]
    transcript = Transcript()
    assert [transcript.take(each) for each in events] == events


@pytest.mark.parametrize("other", [["ax", "c"], ["x"], ["a", "x"]])
def test_a_stream_that_says_something_else_is_noticed(other):
    transcript = Transcript()
    transcript.take(event(1, piece(0, "abc")))
    transcript.repeat()
    with pytest.raises(Parted, match="choice 0"):
        for text in other:
            transcript.take(event(2, piece(0, text)))
        transcript.take(event(2, piece(0, "", finish="stop")))


def test_an_error_of_the_replica_is_not_the_requests():
    def failed(code):
        return b"data: " + to_json({"error": {"message": "no", "type": "server_error", "param": None, "code": code}})

    transcript = Transcript()
    for code in ("engine_failed", "draining"):
        with pytest.raises(Interrupted, match="no"):
            transcript.take(failed(code))
    assert transcript.take(failed("time_limit")) == failed("time_limit")


def grow(nodes, events):
    """Let a client's tree grow, and return what else is said."""
    rest = []
    for each in events:
        if each == DONE:
            continue
        chunk = json.loads(each.removeprefix(b"data: "))
        rest += chunk["choices"]
        more = chunk.get("treewise", {})
        for node in more.get("nodes", []):
            known = nodes.setdefault(node["id"], {**node, "text": ""})
            assert known["parent"] == node["parent"] and known["path"] == node["path"]
            nodes[node["id"]] = {**node, "text": known["text"] + node["text"]}
        if "chosen" in more:
            rest.append(nodes[more["chosen"]]["path"])
    return rest


@pytest.mark.anyio
@pytest.mark.parametrize(
    "search",
    [
        {"strategy": "best_of_n", "n": 4, "max_tokens": 12},
        {"strategy": "tot", "depth": 2, "width": 3, "beam": 2, "thought_tokens": 6, "answer_tokens": 6},
        {"strategy": "mcts", "iterations": 5, "width": 2, "depth": 2, "thought_tokens": 5, "answer_tokens": 5},
    ],
)
async def test_the_tree_of_a_search_grows_on(search, monkeypatch):
    monkeypatch.setattr("treewise.server.searches.PER_SECOND", 1e9)
    monkeypatch.setattr("treewise.server.searches.SHARE", 0)
    body = {"prompt": "abc", "stream": True, "search": {**search, "tree": True}, "seed": 4}
    async with running(tiny_llm(codec=ChatBytes())) as server:
        whole = (await server.client.post("/v1/completions", json=body)).content.split(b"\n\n")[:-1]
        monkeypatch.setattr("treewise.server.searches.PER_SECOND", 50)
        other = (await server.client.post("/v1/completions", json=body)).content.split(b"\n\n")[:-1]
    assert len(other) < len(whole)  # it is told of in larger steps
    expected = {}
    answers = grow(expected, whole)
    for end in (1, 3, len(whole) // 2, len(whole) - 2):
        transcript = Transcript()
        first = [transcript.take(each) for each in whole[:end]]
        transcript.repeat()
        second = [told for each in other if (told := transcript.take(each)) is not None]
        tree = {}
        assert grow(tree, [*first, *second]) == answers and transcript.is_over
        assert {tuple(node["path"] or "p"): facts(node) for node in tree.values()} == {
            tuple(node["path"] or "p"): facts(node) for node in expected.values()
        }


def facts(node):
    return {name: node[name] for name in ("text", "tokens", "logprob", "score", "state")}

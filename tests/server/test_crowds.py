"""Clients that are killed, and a server that is told to end: nothing leaks, and nothing that was accepted is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from typing import Any

import httpx
from serving import process
from threaded import served
from tiny import ChatBytes, tiny_llm

from treewise import LLM, SamplingParams

KILLED = 1000
TOGETHER = 50
CLIENT = r"""
import socket, sys
host, port, count, waits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "waits"
sockets = []
for number in range(count):
    body = b'{"prompt": "go on, %d", "max_tokens": 480, "n": %d' % (number, 1 + number % 3)
    body += b', "ignore_eos": true, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    sockets.append(socket.create_connection((host, port)))
    sockets[-1].sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
for each in sockets if waits else ():
    assert b"200" in each.recv(4096)
print("begun", flush=True)
sys.stdin.read()
"""


def test_a_thousand_clients_are_killed_in_mid_stream():
    with served(tiny_llm(codec=ChatBytes(), num_kv_slots=65536)) as server:
        plain = {"prompt": "What is left?", "max_tokens": 12, "temperature": 0}
        before = httpx.post(server.url + "v1/completions", json=plain).json()["choices"][0]["text"]
        server.settled()
        threads = threading.active_count()
        for turn in range(KILLED // TOGETHER):
            # Every fourth crowd is killed as soon as it has asked: before, or while, its prompts are computed.
            waits = "waits" if turn % 4 else "goes"
            command = [sys.executable, "-S", "-E", "-c", CLIENT, server.host, str(server.port), str(TOGETHER), waits]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
                assert client.stdout is not None and client.stdout.readline() == b"begun\n"
                client.kill()
        state = server.settled()
        # Those that were killed at once may have gone before their bodies were read.
        assert state["requests_total"] >= KILLED * 3 // 4
        assert threading.active_count() <= threads + 1
        after = httpx.post(server.url + "v1/completions", json=plain).json()["choices"][0]["text"]
        assert after == before != ""


async def whole(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Ask for a completion."""
    answer = await client.post("/v1/completions", json=order(number))
    assert answer.status_code == 200, answer.text
    content: dict[str, Any] = answer.json()
    return content


async def streamed(client: httpx.AsyncClient, number: int) -> dict[str, Any]:
    """Ask for a stream, and put it together."""
    body = order(number) | {"stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    last = [choice for chunk in chunks for choice in chunk["choices"]][-1]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    return {"choices": [last | {"text": text}], "usage": chunks[-1]["usage"]}


def order(number: int) -> dict[str, Any]:
    return {"prompt": f"Order {number}:", "max_tokens": 100 + number, "ignore_eos": True, "seed": number}


def test_sigterm_loses_no_answer(tiny_folder):
    alone = LLM(str(tiny_folder), device="cpu")
    with process(str(tiny_folder), "--max-running", "8") as (server, url):  # the others wait
        asyncio.run(_end_under_load(server, url, alone))
        assert server.wait(30) == 0


async def _end_under_load(server: subprocess.Popen[str], url: str, alone: LLM) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=None)) as client:
        asked = [asyncio.create_task((whole if number % 2 else streamed)(client, number)) for number in range(32)]
        while True:
            state = (await client.get("/state")).json()
            if state["running"] + state["waiting"] == len(asked):
                break
            assert not any(each.done() for each in asked), "too quick to be ended"
            await asyncio.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        late = await client.post("/v1/completions", json=order(0))
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining") and "retry-after" in late.headers
        answers = await asyncio.gather(*asked)
    orders = [order(number) for number in range(len(asked))]
    prompts = [each.pop("prompt") for each in orders]
    offline = alone.generate(prompts, [SamplingParams(**each) for each in orders])
    for own, answer, expected in zip(orders, answers, offline, strict=True):
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == own["max_tokens"]
        assert answer["choices"][0]["text"] == expected.outputs[0].text

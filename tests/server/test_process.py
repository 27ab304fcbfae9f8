"""`treewise serve` as a process: start, signals, ports, keys."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import pytest
from serving import process

pytestmark = pytest.mark.timeout(120)
SMALL = ("--device", "cpu", "--num-kv-slots", "4096", "--max-running", "4")


def stream(url, tokens, pieces):
    body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with (
        suppress(httpx.TransportError),  # the server may be killed
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as response,
    ):
        pieces += response.iter_lines()


def started(target, *arguments):
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_signal_lets_running_requests_finish(tiny_folder):
    with process(str(tiny_folder), *SMALL) as (server, url):
        models = httpx.get(f"{url}/v1/models").json()
        assert models["data"][0]["id"] == tiny_folder.name
        streams = [[] for _ in range(6)]  # more than run side by side
        threads = [started(stream, url, 150, pieces) for pieces in streams]
        wait_for(lambda: httpx.get(f"{url}/state").json()["requests_total"] == 6 and any(streams))
        with httpx.Client() as late:
            assert late.get(f"{url}/ready").status_code == 200
            server.send_signal(signal.SIGTERM)
            wait_for(lambda: late.get(f"{url}/ready").status_code == 503)
            refused = late.post(f"{url}/v1/completions", json={"prompt": "late"})
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert late.get(f"{url}/health").status_code == 200
        for thread in threads:
            thread.join(60)
        assert server.wait(30) == 0
        for pieces in streams:
            events = [line.removeprefix("data: ") for line in pieces if line]
            assert events[-1] == "[DONE]"
            assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
            assert len("".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])) > 0
        _, errors = server.communicate()
        assert "Traceback" not in errors


def test_a_second_signal_ends_it_at_once(tiny_folder):
    with process(str(tiny_folder), *SMALL) as (server, url):
        pieces = []
        started(stream, url, 4000, pieces)
        wait_for(lambda: pieces)
        server.send_signal(signal.SIGINT)
        wait_for(lambda: httpx.get(f"{url}/ready").status_code == 503)
        server.send_signal(signal.SIGINT)
        assert server.wait(10) == 1


def test_what_does_not_finish_in_time_is_cut_off(tiny_folder):
    with process(str(tiny_folder), *SMALL, "--drain-timeout", "0.2") as (server, url):
        pieces = []
        thread = started(stream, url, 4000, pieces)
        wait_for(lambda: pieces)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        thread.join(20)
        assert json.loads(pieces[-4].removeprefix("data: "))["error"]["code"] == "draining"


def test_a_taken_port_ends_it_before_the_model_is_loaded(tiny_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "treewise", "serve", "no-such-model", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2 and done.stdout == ""
    assert f"127.0.0.1:{port}" in done.stderr and len(done.stderr.splitlines()) == 1


def test_of_several_servers_at_one_port_one_stays(tiny_folder):
    port = random.randrange(20000, 30000)  # below those that systems hand out
    command = [sys.executable, "-m", "treewise", "serve", str(tiny_folder), *SMALL, "--port", str(port)]
    servers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        wait_for(lambda: sum(server.poll() is not None for server in servers) == 2)
        assert sorted(str(server.returncode) for server in servers) == ["2", "2", "None"]
        [stays] = [server for server in servers if server.poll() is None]
        assert "Serving" in stays.stdout.readline(), stays.stderr.read()
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    finally:
        for server in servers:
            server.kill()
            server.communicate()


def test_keys_may_come_from_the_environment(tiny_folder):
    with process(str(tiny_folder), *SMALL, "--api-key", "one", TREEWISE_API_KEY="two, three") as (_, url):
        for key, status in (("one", 200), ("two", 200), ("three", 200), ("four", 401)):
            answer = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status


def test_nothing_is_said_of_what_is_asked(tiny_folder):
    with process(str(tiny_folder), *SMALL) as (server, url):
        for body in ({"prompt": "a secret"}, {"prompt": "a secret", "n": 0}, {"prompt": ["a secret", ""]}):
            httpx.post(f"{url}/v1/completions", json=body)
        server.send_signal(signal.SIGTERM)
        output, errors = server.communicate(timeout=30)
        assert output == "" and "secret" not in errors


def test_it_says_what_is_missing(tmp_path):
    (tmp_path / "fastapi.py").write_text("raise ImportError('no fastapi here')")
    done = subprocess.run(
        [sys.executable, "-m", "treewise", "serve"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.returncode == 2 and "pip install 'treewise[server]'" in done.stderr

"""`treewise serve --data-parallel-size` as a process, and the front under Ray Serve."""

import json
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import psutil
import pytest
from fleets import CHAT, LONG, TINY, Told, wait_for

from treewise.server.sockets import address_of, bind

pytestmark = pytest.mark.timeout(300)


def stream(url, told, **body):
    with httpx.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line:
                told.take(line)


def replicas_of(process):
    children = psutil.Process(process.pid).children(recursive=True)
    return [child.pid for child in children if "ray::Replica" in " ".join(child.cmdline())]


def test_a_process_with_two_replicas(tiny_folder):
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "treewise", "serve", str(tiny_folder), "--port", "0", "--device", "cpu"]
    command += ["--num-kv-slots", "4096", "--data-parallel-size", "2", "--capture-rows", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        line = server.stdout.readline()
        assert line.startswith(f"Serving {tiny_folder} at http://127.0.0.1:"), server.stderr.read()
        url = re.search(r"http://\S+", line)[0]
        expected, told = Told(), Told()
        stream(url, expected, **LONG)
        running = threading.Thread(target=stream, args=(url, told), kwargs=LONG)
        running.start()
        wait_for(lambda: told.chunks > 20)
        before = replicas_of(server)
        assert len(before) == 2
        for replica in before:  # of which one does the work
            os.kill(replica, signal.SIGKILL)
        running.join()
        assert told.texts == expected.texts and told.is_over

        def starts():
            health = httpx.get(f"{url}/health").json()
            return [each["starts"] for each in health["replicas"] if each["state"] == "ready"]

        wait_for(lambda: starts() == [2, 2])
        server.send_signal(signal.SIGHUP)
        wait_for(lambda: starts() == [3, 3])
        last = Told()
        running = threading.Thread(target=stream, args=(url, last), kwargs=LONG)
        running.start()
        wait_for(lambda: last.chunks > 5)
        server.send_signal(signal.SIGTERM)
        running.join()
        assert last.texts == expected.texts and last.is_over
        assert server.wait(30) == 0
        output, errors = server.communicate()
        assert "Traceback" not in output + errors
    finally:
        if server.poll() is None:
            server.kill()
        server.communicate()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray Serve's own
def test_the_front_under_ray_serve(cluster, tiny_folder):
    from ray import serve

    from treewise.replicas.deployment import app

    with pytest.raises(ValueError, match="tempo: there is no such option; choose from"):
        app({"model": str(tiny_folder), "tempo": "2"})
    # As on a command line, all values are texts.
    options = {"model": str(tiny_folder), "data_parallel_size": "2", "cpus_per_replica": "1", "api_key": "a key"}
    with bind("127.0.0.1", 0) as listener:  # a free port: Ray Serve does not tell which one it takes itself
        url, port = address_of(listener), listener.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        serve.run(app(options | {name: json.dumps(value).strip('"') for name, value in TINY.items()}), name="treewise")
        with httpx.Client(base_url=url, headers={"authorization": "Bearer a key"}, timeout=60) as client:
            health = client.get("/health").json()
            assert [each["state"] for each in health["replicas"]] == ["ready", "ready"]
            whole = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 9, "seed": 1}).json()
            assert whole["usage"]["completion_tokens"] == 9
            told = Told()
            with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                for line in filter(None, response.iter_lines()):
                    told.take(line)
            assert told.is_over and told.ends == {0: "length"}
            assert client.get("/ready", headers={"authorization": "none"}).status_code == 200
            assert client.get("/state", headers={"authorization": "none"}).status_code == 401
    finally:
        serve.shutdown()

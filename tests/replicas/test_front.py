"""The API over two replicas: it is that of one server, whatever becomes of the replicas."""

import re
import threading

import httpx
import pytest
from fleets import CHAT, KEY, LONG, TINY, fronted, wait_for
from prometheus_client.parser import text_string_to_metric_families

from treewise import SamplingParams
from treewise.llm import LLM

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def front(cluster, tiny_folder):
    with fronted(tiny_folder) as front:
        yield front
        wait_for(lambda: front.fleet.num_open == 0, timeout=5)


def test_it_answers_as_one_engine_does(front, tiny_folder):
    llm = LLM(str(tiny_folder), **TINY)
    params = SamplingParams(n=3, max_tokens=20, ignore_eos=True, seed=7)
    [expected] = llm.generate("hello", params)
    texts = [output.text for output in expected.outputs]
    body = {"prompt": "hello", "n": 3, "max_tokens": 20, "ignore_eos": True, "seed": 7}
    for _ in range(2):  # on either replica
        answer = front.post(**body)
        assert [choice["text"] for choice in answer["choices"]] == texts
    told = front.stream(**body, stream_options={"include_usage": True})
    assert [told.texts[index] for index in range(3)] == texts and told.is_over and len(told.ids) == 1
    assert told.usage["completion_tokens"] == 60
    chat = front.post("/v1/chat/completions", **CHAT, max_tokens=9, ignore_eos=True, seed=1)
    streamed = front.stream("/v1/chat/completions", **CHAT, max_tokens=9, ignore_eos=True, seed=1)
    assert streamed.texts == {0: chat["choices"][0]["message"]["content"]} and streamed.ends == {0: "length"}
    found = front.post(prompt="ab", seed=2, search={"strategy": "best_of_n", "n": 3, "max_tokens": 5, "tree": True})
    assert found["treewise"]["tree"]["strategy"] == "best_of_n"


def test_what_has_no_seed_differs_unless_the_header_has_one(front):
    body = {"prompt": ["same", "same"], "max_tokens": 12, "ignore_eos": True}

    def texts(**headers):
        response = front.client.post("/v1/completions", json=body, headers=headers)
        return [choice["text"] for choice in response.json()["choices"]]

    first, again = texts(), texts()
    assert len({*first, *again}) == 4
    chosen = texts(**{"x-treewise-seed": "8"})
    assert chosen == texts(**{"x-treewise-seed": "8"}) and len(set(chosen)) == 2
    wrong = front.client.post("/v1/completions", json=body, headers={"x-treewise-seed": "8.5"})
    assert wrong.status_code == 400 and "x-treewise-seed" in wrong.json()["error"]["message"]


def test_the_other_endpoints(front, tiny_folder):
    get = front.client.get
    [model] = get("/v1/models").json()["data"]
    assert model["id"] == tiny_folder.name and get(f"/v1/models/{model['id']}").json()["id"] == model["id"]
    assert get("/v1/models/another").status_code == 404
    tokens = front.post("/tokenize", prompt="abc")["tokens"]
    assert front.post("/detokenize", tokens=tokens) == {"prompt": "abc"}
    assert get("/tokenizer_info").json()["eos_token"] == "<|end|>"
    assert "mcts" in str(get("/strategies").json()) and get("/version").json()["version"]
    assert get("/ready").json() == {"status": "ok"}
    health = get("/health").json()
    assert health["status"] == "ok" and [each["state"] for each in health["replicas"]] == ["ready", "ready"]
    state = get("/state").json()
    assert state["model"] == model["id"] and set(state["replicas"]) == {"0", "1"}
    assert state["kv_slots"]["total"] == sum(each["kv_slots"]["total"] for each in state["replicas"].values())
    assert "<html" in get("/").text and "/v1/completions" in get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b"[1, 2]", 400, None),
        ("/v1/completions", b'{"prompt": []}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": [[1], "a"]}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "a", "n": "many", "max_tokens": [3]}', 400, "n"),
        ("/v1/completions", b'{"prompt": "a", "n": 1e999}', 400, "n"),
        ("/v1/completions", b'{"prompt": "a", "namespace": {"a": 1}}', 400, "namespace"),
        ("/v1/completions", b'{"prompt": "a", "stream": true, "best_of": 2}', 400, "best_of"),
        ("/v1/chat/completions", b'{"messages": [{"role": 3}]}', 400, "messages"),
        ("/tokenize", b'{"prompt": 3}', 400, "prompt"),
        ("/v1/completions", b'{"prompt": "a", "model": "another"}', 404, "model"),
    ],
)
def test_what_is_wrong_is_told_as_one_server_tells_it(front, path, body, status, param):
    response = front.client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param


def test_who_may_ask_and_how_much(front):
    with httpx.Client(base_url=front.url) as stranger:
        assert stranger.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert stranger.get("/health").status_code == 200 and stranger.get("/metrics").status_code == 401
        url = front.fleet.members[0].facts.url
        for key in ("none", KEY):  # a replica's own server lets only the front in
            refused = stranger.post(f"{url}/v1/completions", json={}, headers={"authorization": f"Bearer {key}"})
            assert refused.status_code == 401
    assert front.client.post("/v1/completions", content=b"x").status_code == 415
    huge = front.client.post("/v1/completions", json={"prompt": "a" * (5 << 20)})
    assert huge.status_code == 413
    assert front.client.get("/v1/completions").status_code == 405


def metric(front, name):
    """Values of a metric by replica."""
    families = text_string_to_metric_families(front.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == f"treewise:{name}"]
    return {sample.labels.get("replica", ""): sample.value for sample in samples}


def test_metrics_have_the_replica_for_a_label(front):
    front.post(**LONG)
    text = front.client.get("/metrics").text
    kinds = re.findall(r"^# TYPE (\S+)", text, flags=re.MULTILINE)
    assert len(kinds) == len(set(kinds)) > 40
    tokens = metric(front, "generation_tokens_total")
    assert set(tokens) == {"0", "1"} and sum(tokens.values()) >= LONG["max_tokens"]
    assert metric(front, "requests_resent_total")[""] >= 0
    assert 'treewise:replicas{state="ready"} 2.0' in text


def test_a_request_goes_where_its_prefix_is(front):
    before = metric(front, "prefix_cache_hits_total")
    documents = [f"{number} " * 300 for number in range(6)]
    cached = []
    for turn in range(3):
        for document in documents:
            usage = front.post(prompt=f"{document}{turn}", max_tokens=2)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert all(tokens < 64 for tokens in cached[:6]) and all(tokens >= 560 for tokens in cached[6:])
    gained = {name: hits - before[name] for name, hits in metric(front, "prefix_cache_hits_total").items()}
    assert all(hits >= 2 * 3 * 560 for hits in gained.values())  # three documents each


def test_the_work_ends_when_its_client_goes(front):
    body = {"prompt": "hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with front.client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        wait_for(lambda: front.client.get("/state").json()["running"] == 1)
    wait_for(lambda: front.client.get("/state").json()["running"] == 0, timeout=2)
    assert front.fleet.num_open == 0


def test_of_too_many_requests_some_are_turned_away(cluster, tiny_folder):
    with fronted(tiny_folder, data_parallel_size=1, max_running=1, max_waiting=1) as front:
        streams = [threading.Thread(target=front.stream, kwargs={**LONG, "max_tokens": 1000}) for _ in range(2)]
        for stream in streams:
            stream.start()
        wait_for(lambda: front.fleet.num_open == 2)
        refused = front.client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 429 and refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"] == "1"
        for stream in streams:
            stream.join()
        assert front.post(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1
        assert metric(front, "front_requests_refused_total")[""] == 1
        # What is left when the time is up is told so.
        told = []
        stream = threading.Thread(target=lambda: told.append(front.stream(**{**LONG, "max_tokens": 3000})))
        stream.start()
        wait_for(lambda: front.fleet.num_open == 1)
        assert front.call(front.fleet.drain(0.3)) is False
        stream.join()
        assert told[0].error["code"] == "draining" and told[0].is_over
        assert front.client.get("/ready").status_code == 503
        assert front.client.post("/v1/completions", json={"prompt": "a"}).json()["error"]["code"] == "draining"


@pytest.mark.slow
def test_a_real_model_on_two_replicas(cluster):
    question = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    with fronted("smollm2-135m") as front:
        body = {"messages": question, "temperature": 0, "max_tokens": 30}
        texts = {front.post("/v1/chat/completions", **body)["choices"][0]["message"]["content"] for _ in range(2)}
        told = front.stream("/v1/chat/completions", **body, at=3, then=front.kill)
        assert texts == {told.texts[0]} and "Paris" in told.texts[0]
        story = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 1, "n": 2}
        expected = front.post(**story)["choices"]
        front.whole()
        told = front.stream(**story, at=20, then=front.kill)
        assert [told.texts[index] for index in range(2)] == [choice["text"] for choice in expected]

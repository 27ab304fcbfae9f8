"""Replicas that die, hang or are restarted while they work: clients do not notice."""

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fleets import CHAT, LONG, fronted, wait_for

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def front(cluster, tiny_folder):
    with fronted(tiny_folder) as front:
        yield front
        wait_for(lambda: front.fleet.num_open == 0, timeout=5)


@pytest.fixture(autouse=True)
def all_are_there(front):
    front.whole()


@pytest.mark.parametrize("more", [{}, {"n": 3, "logprobs": 2}, {"prompt": ["a", "b"], "stop": "zz"}])
def test_a_stream_goes_on_when_its_replica_is_killed(front, more):
    body = {**LONG, **more}
    expected, lost = front.stream(**body), front.fleet.num_lost
    told = front.stream(**body, at=expected.chunks // 3, then=front.kill)
    assert told.texts == expected.texts and told.ends == expected.ends and told.error is None
    assert told.is_over and len(told.ids) == 1
    wait_for(lambda: front.fleet.num_lost == lost + 1)


def test_a_chat_and_a_search_go_on_too(front):
    chat = {**CHAT, "max_tokens": 120, "ignore_eos": True, "seed": 3}
    expected = front.stream("/v1/chat/completions", **chat)
    told = front.stream("/v1/chat/completions", **chat, at=40, then=front.kill)
    assert told.texts == expected.texts and told.is_over
    front.whole()
    search = {"prompt": "abc", "seed": 4, "search": {"strategy": "best_of_n", "n": 4, "max_tokens": 80}}
    expected = front.stream(**search)
    told = front.stream(**search, at=2, then=front.kill)
    assert told.texts == expected.texts and told.is_over


def test_whole_answers_are_given_once_when_a_replica_is_killed(front):
    expected = front.post(**LONG)["choices"][0]["text"]
    killing = threading.Timer(0.2, front.kill)
    killing.start()
    with ThreadPoolExecutor(6) as pool:
        answers = [asked.result() for asked in [pool.submit(front.post, **LONG) for _ in range(6)]]
    killing.join()
    assert [answer["choices"][0]["text"] for answer in answers] == [expected] * 6


def test_one_that_hangs_is_replaced(front, monkeypatch):
    monkeypatch.setattr("treewise.replicas.fleet.SILENCE", 2.0)
    monkeypatch.setattr("treewise.replicas.fleet.PING_SECONDS", 0.2)
    expected, lost = front.stream(**LONG), front.fleet.num_lost
    told = front.stream(**LONG, at=50, then=lambda: front.kill(signal.SIGSTOP))
    assert told.texts == expected.texts and told.is_over and front.fleet.num_lost == lost + 1


def test_a_rolling_restart_under_load_loses_nothing(front):
    expected, before = front.stream(**LONG), [member.facts.process_id for member in front.fleet.members]
    ending, told, ready = threading.Event(), [], []

    def ask():
        while not ending.is_set():
            told.append(front.stream(**LONG))

    def look():
        while not ending.is_set():
            ready.append(httpx.get(f"{front.url}/ready").status_code)
            time.sleep(0.05)

    threads = [threading.Thread(target=target) for target in (ask, ask, look)]
    for thread in threads:
        thread.start()
    lost = front.fleet.num_lost
    front.call(front.fleet.restart())
    ending.set()
    for thread in threads:
        thread.join()
    assert set(ready) == {200} and front.fleet.num_lost == lost
    assert len(told) > 3 and all(each.texts == expected.texts and each.is_over for each in told)
    assert not {member.facts.process_id for member in front.fleet.members} & {*before}

"""Replicas are killed one after the other while clients stream: nothing is lost, nothing comes twice."""

import os
import random
import signal
import threading
import time

import pytest
from fleets import fronted, wait_for

CLIENTS = 4


@pytest.mark.parametrize(
    "kills", [pytest.param(10, marks=pytest.mark.timeout(300)), pytest.param(200, marks=[pytest.mark.stress])]
)
@pytest.mark.timeout(3000)
def test_kills_under_load_lose_nothing(cluster, tiny_folder, kills):
    rng = random.Random(kills)
    bodies = [
        {"prompt": f"{number} " * 40, "max_tokens": 20 + 20 * number, "ignore_eos": True, "seed": number, "n": n}
        for number in range(4)
        for n in (1, 2)
    ]
    with fronted(tiny_folder, max_attempts=50) as front:
        fleet = front.fleet
        expected = [front.stream(**body, stream_options={"include_usage": True}) for body in bodies]
        ending, errors, answered = threading.Event(), [], []

        def ask(own: random.Random) -> None:
            while not ending.is_set():
                which = own.randrange(len(bodies))
                try:
                    if own.random() < 0.5:
                        told = front.stream(**bodies[which], stream_options={"include_usage": True})
                        assert told.error is None and told.is_over and len(told.ids) == 1
                        assert told.usage["completion_tokens"] == expected[which].usage["completion_tokens"]
                        texts = told.texts
                    else:
                        choices = front.post(**bodies[which])["choices"]
                        texts = {choice["index"]: choice["text"] for choice in choices}
                    assert texts == expected[which].texts
                except BaseException as error:
                    errors.append(error)
                answered.append(which)

        clients = [threading.Thread(target=ask, args=(random.Random(number),)) for number in range(CLIENTS)]
        for client in clients:
            client.start()
        for number in range(kills):
            before = len(answered)
            wait_for(lambda before=before: len(answered) > before + 1, timeout=120)
            time.sleep(rng.uniform(0, 0.3))
            wait_for(lambda: fleet.members, timeout=120)
            living = [member for member in fleet.members if not member.end.done()]
            os.kill(rng.choice(living).facts.process_id, signal.SIGKILL)
            wait_for(lambda number=number: fleet.num_lost > number, timeout=120)
        ending.set()
        for client in clients:
            client.join()
        front.whole()
        assert not errors, errors[0]
        assert fleet.num_lost == kills and fleet.num_resent > kills // 2
        assert len(answered) == fleet.num_requests - len(bodies)
        wait_for(lambda: fleet.num_open == 0, timeout=5)
        print(f"{fleet.num_lost} kills, {len(answered)} requests, {fleet.num_resent} sent again")

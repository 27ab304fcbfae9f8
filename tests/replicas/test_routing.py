"""Where requests go: prefixes, loads, what is remembered."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treewise.replicas.routing import AGAIN, BLOCK_TOKENS, PrefixRouter, RoundRobin
from treewise.replicas.settings import FleetOptions


def router_of(*names, capacity=1 << 16):
    router = PrefixRouter()
    for name in names:
        router.add(name, capacity)
    return router


def send(router, prompt, **options):
    route = router.route(prompt, **options)
    router.began(route)
    return route


def document(number, length=400):
    return [number * 10_000 + token for token in range(length)]


def test_what_is_known_goes_where_it_is_known():
    router = router_of("a", "b", "c")
    homes = {}
    for number in range(9):
        route = send(router, document(number))
        router.ended(route)
        homes[number] = route.name
    assert sorted(homes.values()) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3  # those that know nothing yet take what is new
    for number, home in homes.items():
        route = send(router, [*document(number), 1, 2, 3])
        assert (route.name, route.matched, route.work) == (home, 400, 3)
        router.ended(route)


def test_a_text_is_known_by_its_characters_and_tokens_by_their_ids():
    router = router_of("a", "b")
    text = "The quick brown fox jumps over the lazy dog. " * 20
    first = send(router, text)
    assert router.route(text + "And?").matched == first.work - 1 == 224
    assert first.work == len(text) // 4
    assert router.route([ord(character) for character in text]).matched == 0


def test_namespaces_share_nothing():
    router = router_of("a", "b")
    send(router, document(0), namespace="one")
    assert router.route(document(0), namespace="two").matched == 0
    assert router.route(document(0), namespace="one").matched == 400


def test_a_replica_with_too_much_to_do_shares_its_prefix():
    router = router_of("a", "b")
    first = send(router, document(0))
    router.ended(first)
    other = "b" if first.name == "a" else "a"
    names = [send(router, document(0), decode=50).name for _ in range(60)]
    # Sixteen of fifty tokens are under way there: now it costs no less than to compute the prompt a second time.
    assert names[:17] == [first.name] * 16 + [other]
    # The other one has it too from then on, and catches up.
    assert abs(router.load("a") - router.load("b")) <= 50


def test_what_is_not_known_goes_to_whom_has_least_to_do():
    router = router_of("a", "b", "c")
    send(router, document(0, 1000))
    send(router, document(1, 100))
    assert send(router, document(2, 20)).name == "c"
    assert send(router, document(3, 10)).name == "c"
    assert send(router, document(4, 200)).name == "c"
    assert send(router, document(5, 10)).name == "b"


def test_the_oldest_is_forgotten_and_of_a_prompt_its_end_first():
    router = router_of("a", capacity=40 * BLOCK_TOKENS)
    for number in range(3):
        router.ended(send(router, document(number, 16 * BLOCK_TOKENS)))
    assert router.remembered("a") == 40 * BLOCK_TOKENS
    assert [router.route(document(number, 16 * BLOCK_TOKENS)).matched // BLOCK_TOKENS for number in range(3)] == [
        8,
        16,
        16,
    ]


def test_replicas_come_and_go():
    router = router_of("a", "b")
    route = send(router, document(0))
    router.remove(route.name)
    [other] = router.names
    assert router.route(document(0)).name == other
    router.add(route.name)
    router.ended(route)  # of the one before
    assert router.load(route.name) == 0 and router.route(document(0)).matched == 0
    router.began(router.route([1, 2, 3]))
    assert router.route([5], avoid=[route.name]).name == other
    assert router.route([5], avoid=["a", "b"]).name in ("a", "b")
    for name in ("a", "b", "b"):
        router.remove(name)
    with pytest.raises(LookupError):
        router.route([1])
    router.began(route)  # it is gone: nothing happens


def test_a_name_is_one_replicas_and_it_holds_something():
    router = router_of("a")
    with pytest.raises(ValueError, match="name: there is a replica 'a' already"):
        router.add("a")
    with pytest.raises(ValueError, match="capacity"):
        router.add("b", 0)


def test_the_same_turn_for_everybody():
    router = RoundRobin()
    for name in "abc":
        router.add(name)
    assert [send(router, [1] * 50).name for _ in range(7)] == list("abcabca")
    router.remove("b")
    assert [send(router, "text").name for _ in range(3)] == list("cac")
    assert router.names == ["a", "c"]
    assert router.route("text", avoid=["a"]).name == "c"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data_parallel_size": 0}, "data_parallel_size"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"cpus_per_replica": 0}, "cpus_per_replica"),
        ({"start_timeout": 0}, "start_timeout"),
        ({"restart_timeout": -1}, "restart_timeout"),
        ({"routing": "nearest"}, "routing: 'nearest' is not one of prefix, round_robin"),
    ],
)
def test_options_out_of_range(wrong, message):
    with pytest.raises(ValueError, match=message):
        FleetOptions(**wrong)


PROMPTS = st.lists(st.integers(0, 1), max_size=6).map(lambda halves: [half for half in halves for _ in range(10)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "end", "leave", "join"]), PROMPTS, st.integers(0, 9)), max_size=60))
def test_whatever_happens_the_books_are_kept(events):
    """Against a plain account: what each replica was sent since it joined, and what is open there."""
    router, sent, load, opened = router_of("0", "1", "2"), {name: [] for name in "012"}, dict.fromkeys("012", 0), []
    for event, prompt, number in events:
        name = str(number % 3)
        if event == "ask" and sent:
            route = router.route(prompt, decode=number)
            whole = len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS
            matches = {
                each: max((common(prompt, other, whole) for other in prompts), default=0)
                for each, prompts in sent.items()
            }
            costs = {each: load[each] + AGAIN * (len(prompt) - matches[each]) for each in sent}
            assert route.matched == matches[route.name] and costs[route.name] == min(costs.values())
            router.began(route)
            sent[route.name].append(prompt)
            load[route.name] += route.work
            opened.append(route)
        elif event == "end" and opened:
            route = opened.pop(number % len(opened))
            router.ended(route)
            router.ended(route)  # once is enough
            load[route.name] -= route.work
        elif event == "leave":
            router.remove(name)
            sent.pop(name, None)
            load.pop(name, None)
            opened = [route for route in opened if route.name != name]
        elif event == "join" and name not in sent:
            router.add(name)
            sent[name], load[name] = [], 0
        assert sorted(router.names) == sorted(sent)
        assert {each: router.load(each) for each in sent} == load


def common(prompt, other, whole):
    """Tokens of whole blocks that two prompts begin with."""
    length = next(
        (i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(len(prompt), len(other))
    )
    return min(length // BLOCK_TOKENS * BLOCK_TOKENS, whole)

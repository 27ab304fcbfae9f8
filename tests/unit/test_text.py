"""Text as it streams: UTF-8 split over tokens, stop strings split over tokens, long stop lists."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_model import Letters

from treewise.text import Detokenizer


def stream(pieces, stop=(), finish=True, **options):
    """Push every piece as a token; the deltas and the detokenizer."""
    detokenizer = Detokenizer(Letters(pieces), stop, **options)
    deltas = []
    for token in range(len(pieces)):
        detokenizer.push(token)
        deltas.append(detokenizer.delta())
    if finish:
        detokenizer.finish()
        deltas.append(detokenizer.delta())
    assert "".join(deltas) == detokenizer.text[: len("".join(deltas))]
    if finish:
        assert "".join(deltas) == detokenizer.text
    return deltas, detokenizer


def naive(text, stop, include=False):
    """Earliest completion wins, ties by list order."""
    for end in range(1, len(text) + 1):
        for string in stop:
            if text[:end].endswith(string):
                return text[: end if include else end - len(string)], string
    return text, None


def test_stop_string_split_over_tokens_does_not_leak():
    pieces = [" ABC", "DEF", "GH", "I", "J", "K"]
    deltas, detokenizer = stream(pieces, ["DEFGHIJ"])
    assert deltas == [" ABC", "", "", "", "", "", ""]
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("DEFGHIJ", 5)
    deltas, detokenizer = stream(pieces, ["DEFGHIJ"], include_stop=True)
    assert (detokenizer.text, deltas[4]) == (" ABCDEFGHIJ", "DEFGHIJ")


def test_held_text_comes_out_when_no_stop_follows():
    deltas, detokenizer = stream(["ABC", "DEF", "GH", "x", "DEF"], ["DEFGHIJ"])
    assert deltas == ["ABC", "", "", "DEFGHx", "", "DEF"]
    assert detokenizer.stopped is None


@pytest.mark.parametrize("text", ["👍", "你好", "ď", "a👍b你c"])
def test_characters_split_over_tokens_stay_whole(text):
    pieces = [bytes([byte]) for byte in text.encode()]
    deltas, detokenizer = stream(pieces)
    assert "".join(deltas) == detokenizer.text == text
    assert "�" not in "".join(deltas)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_cut_at_the_end_is_flushed_once(cut):
    pieces = [b"a", *(bytes([byte]) for byte in "👍".encode()[:cut])]
    deltas, detokenizer = stream(pieces)
    assert deltas == ["a", *[""] * cut, "�"]
    detokenizer.finish()
    assert detokenizer.delta() == ""
    assert detokenizer.text == b"".join(pieces).decode("utf-8", "replace")


def test_invalid_bytes_equal_a_decode_of_the_whole():
    pieces = [b"\xf0\x9f", b"x", b"\xff", b"\xe4\xbd", b"\xa0", b"", b"\xc4"]
    deltas, _ = stream(pieces)
    assert "".join(deltas) == b"".join(pieces).decode("utf-8", "replace")


def test_stop_just_after_a_split_character():
    pieces = [b"\xf0\x9f\x91", b"\x8dE", b"ND", b"more"]
    deltas, detokenizer = stream(pieces, ["END"])
    assert deltas == ["", "👍", "", "", ""]
    assert (detokenizer.text, detokenizer.num_tokens) == ("👍", 3)


def test_a_stop_string_may_hold_split_characters():
    deltas, detokenizer = stream([b"ok \xe4", b"\xbd\xa0", "好".encode()], ["你好"])
    assert (deltas, detokenizer.text) == (["ok ", "", "", ""], "ok ")


@pytest.mark.parametrize("stop", [["cd", "ef"], ["ef", "cd"], ["cd", "cd", "ef"]])
def test_earliest_completion_wins_in_any_list_order(stop):
    _, detokenizer = stream(["ab", "xcdyef", "z"], stop)
    assert (detokenizer.text, detokenizer.stopped, detokenizer.num_tokens) == ("abx", "cd", 2)


@pytest.mark.parametrize(("stop", "text"), [(["bcd", "cd"], "a"), (["cd", "bcd"], "ab")])
def test_ties_go_to_the_first_of_the_list(stop, text):
    _, detokenizer = stream(["abcd"], stop)
    assert (detokenizer.text, detokenizer.stopped) == (text, stop[0])


def test_a_shorter_stop_ends_the_text_before_a_longer_one():
    _, detokenizer = stream(["a", "b", "c", "d"], ["bcd", "c"])
    assert (detokenizer.text, detokenizer.stopped, detokenizer.num_tokens) == ("ab", "c", 3)


def test_tokens_after_the_stop_are_not_taken():
    _, detokenizer = stream(["a", "b", "c", "b"], ["b"])
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)
    assert not detokenizer.completes(1)


def test_stop_strings_within_min_tokens_do_not_count():
    deltas, detokenizer = stream(["ab", "ab", "xa", "b"], ["ab", "b"], min_tokens=2)
    assert (detokenizer.text, detokenizer.num_tokens, detokenizer.stopped) == ("ababx", 4, "ab")
    assert deltas[:3] == ["ab", "ab", "x"]


def test_forks_go_their_own_ways():
    detokenizer = Detokenizer(Letters(["a", "DE", "FG", b"\xf0\x9f", b"\x91\x8d", "z"]), ["DEFG"])
    for token in (0, 1):
        detokenizer.push(token)
    assert detokenizer.delta() == "a"
    assert detokenizer.completes(2)
    left, right = detokenizer.fork(), detokenizer.fork()
    left.push(2)
    right.push(3)
    far = right.fork()
    far.push(4)
    right.push(5)
    assert (left.text, left.stopped, left.delta()) == ("a", "DEFG", "")
    assert (far.text, far.delta()) == ("aDE👍", "DE👍")
    assert right.text == "aDE�z"
    assert (detokenizer.text, detokenizer.stopped, detokenizer.num_tokens) == ("aDE", None, 2)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("ab👍", max_size=3), max_size=12),
    stop=st.lists(st.text("ab👍", min_size=1, max_size=5), max_size=5),
    include=st.booleans(),
)
def test_equals_a_naive_search(pieces, stop, include):
    deltas, detokenizer = stream(pieces, stop, include_stop=include)
    assert (detokenizer.text, detokenizer.stopped) == naive("".join(pieces), stop, include)
    seen = ""
    for delta in deltas:  # at no time is any of the final stop string out
        seen += delta
        assert detokenizer.text.startswith(seen)


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.binary(max_size=4), max_size=8))
def test_any_bytes_equal_a_decode_of_the_whole(data):
    deltas, _ = stream(data)
    assert "".join(deltas) == b"".join(data).decode("utf-8", "replace")


@pytest.mark.parametrize("count", [500, 5_000])
def test_long_stop_lists_cost_little(count):
    chooser = random.Random(count)
    stop = ["".join(chooser.choices("abcdefghij", k=28)) for _ in range(count)]
    stop += [stop[0][:20], stop[1][5:], stop[0] + stop[1]]  # nested and overlapping
    pieces = ["".join(chooser.choices("abcdefghij", k=4)) for _ in range(256)]
    pieces[200:200] = [stop[1][:13], stop[1][13:]]
    started = time.process_time()
    _, detokenizer = stream(pieces, stop)
    seconds = time.process_time() - started
    assert (detokenizer.text, detokenizer.stopped) == naive("".join(pieces), stop)
    assert detokenizer.stopped in stop
    assert seconds < 1.0, seconds


def test_a_self_similar_stop_string_costs_little():
    started = time.process_time()
    _, detokenizer = stream(["a" * 10] * 100, ["a" * 900 + "b"])
    assert detokenizer.text == "a" * 1000
    assert time.process_time() - started < 5.0

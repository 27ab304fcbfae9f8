"""Bodies of requests as careless, unlucky and hostile clients send them: seeded, most of them wrong in one place."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

TEXTS = [
    "",
    " ",
    "Say hello",
    "\x00",
    "\ud83d",
    "👩‍👩‍👧‍👦 " * 3,
    "á" * 40,
    "ْ" * 600,
    "‮\u2066",
    "<script>alert(1)</script>",
    "'; DROP TABLE nodes; --",
    "../../etc/passwd",
    "{{7*7}}",
    "%s%n",
    "None",
    "x" * 5000,
]
NUMBERS = [0, 1, -1, 2, 7, 0.5, -0.5, 1e-9, 1.5, 1e3, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**30, 5e-324]
ODD = [None, True, False, [], {}, [None], [[]], {"": None}, [1, "a"], {"a": {"b": [1]}}, "0", "1", "true", "NaN", "inf"]

FIELDS: dict[str, list[Any]] = {
    "model": [None, "nope", "", 7],
    "n": [1, 2, 3, 0, -1, 129, 10**6, "2"],
    "temperature": [0, 1e-6, 1e-4, 0.7, 1, 1000, -1, 1001, "hot"],
    "top_p": [1, 0.5, 1e-4, 0, 1.5, -1],
    "top_k": [0, -1, 1, 5, 2**30, 0.5, -2],
    "min_p": [0, 0.1, 1, -0.1, 2],
    "presence_penalty": [0, 2, -2, 2.1],
    "frequency_penalty": [0, 1.5, -3],
    "repetition_penalty": [1, 1.3, 0, -1, 100, 101],
    "seed": [0, 42, -1, 2**64, 10**25, 1.5],
    "min_tokens": [0, 1, 3, -1, 10**9],
    "stop": ["a", ["b", "c"], "", [""], ["x"] * 200, ["long" * 500], [1], "\n"],
    "stop_token_ids": [[5], [-1], [10**9], ["a"], 5],
    "ignore_eos": [True, False, 1],
    "include_stop_str_in_output": [True, "yes"],
    "logit_bias": [{"5": 1}, {"5": 101}, {"-1": 1}, {"x": 1}, {"99999999": 1}, {"5": None}, [5]],
    "stream": [True, False, "true", 1],
    "stream_options": [{"include_usage": True}, {}, {"include_usage": 1}, {"what": 1}, []],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}},
        {"type": "xml"},
    ],
    "structured_outputs": [
        {"regex": "[ab]{1,3}"},
        {"regex": "["},
        {"choice": ["a", "b"]},
        {"choice": []},
        {},
        {"json": {}},
    ],
    "guided_regex": ["[0-9]+", "(", "a{1000000}", 3],
    "guided_choice": [["yes", "no"], [], [""], [1]],
    "guided_json": [{"type": "integer"}, "{", {"type": 5}],
    "guided_grammar": ['start: "a" | "b"', "start:", "nonsense"],
    "use_beam_search": [True, False, "no"],
    "beam_width": [1, 2, 4, 0, 10**6],
    "length_penalty": [0, 1, -11],
    "early_stopping": [True, "never", "sometimes"],
    "num_beam_groups": [1, 2, 3, 0],
    "diversity_penalty": [0, 0.5, -1],
    "speculate": [True, False, "ngram"],
    "kv_sparsity": ["full", "h2o", "novita", "nonsense", ""],
    "kv_budget": [8, 0.5, 0, -1, 10**9],
    "priority": [0, 5, -5, 2**31, 1.5],
    "namespace": ["", "tenant", "x" * 300, 5],
    "cache_salt": ["salt", 5],
    "user": ["someone", 5],
    "metadata": [{}, {"a": "b"}, []],
    "unknown_field": [1],
    "search": [
        {"strategy": "best_of_n", "n": 2, "max_tokens": 3},
        {"strategy": "best-of-n", "n": 2, "max_tokens": 2, "tree": True},
        {"strategy": "beam", "beam_width": 2, "max_tokens": 3, "tree": True},
        {"strategy": "self_consistency", "n": 2, "max_tokens": 2},
        {"strategy": "tot", "depth": 1, "width": 2, "thought_tokens": 2, "answer_tokens": 2},
        {"strategy": "tot_dfs", "depth": 1, "width": 1, "budget": 1, "thought_tokens": 2, "answer_tokens": 2},
        {"strategy": "mcts", "iterations": 2, "depth": 1, "width": 2, "thought_tokens": 2, "answer_tokens": 2},
        {"strategy": "step_beam", "depth": 1, "width": 2, "thought_tokens": 2, "answer_tokens": 2},
        {"strategy": "rollouts", "widths": [2], "at": [], "max_tokens": 3},
        {"strategy": "replay", "max_tokens": 3},
        {"strategy": "nonsense"},
        {"strategy": "best_of_n", "n": 10**6},
        {"strategy": "best_of_n", "n": -1},
        {"strategy": "best_of_n", "by": "nobody", "max_tokens": 2},
        {"strategy": "best_of_n", "stop": [""], "max_tokens": 2},
        {"strategy": "best_of_n", "unknown": 1},
        {"strategy": "beam", "beam_width": 2, "max_tokens": 2, "num_beam_groups": 3},
        {"strategy": "mcts", "c": "big", "iterations": 1},
        {"strategy": "rollouts", "widths": [], "at": [1]},
        {"strategy": "replay", "recording": [[0, 0, [1, 1]]]},
        {"strategy": ["best_of_n"]},
        {},
        [],
    ],
}
COMPLETION: dict[str, list[Any]] = {
    "prompt": ["hi", "", [], [""], ["a", ""], [1, 2], [-1], [10**9], [[1], [2]], [[]], ["a"] * 300, None, 5, "x" * 600],
    "echo": [True, False, "loud"],
    "logprobs": [0, 1, 5, -1, 10**6, True],
    "best_of": [1, 2, 0, 10**6],
    "suffix": ["", "end"],
}
CHAT: dict[str, list[Any]] = {
    "messages": [
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": None}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        [{}],
        [],
        ["hi"],
        "hi",
    ],
    "max_completion_tokens": [2, 0, -1],
    "logprobs": [True, False, 5],
    "top_logprobs": [0, 2, -1, 99],
    "add_generation_prompt": [True, False, 5],
    "tools": [[], [{"type": "function"}], 5],
    "tool_choice": ["none", "auto", "required", {"type": "function"}],
}


def bodies(kind: str, count: int, seed: int) -> Iterator[bytes]:
    """Yield bodies for `/v1/completions` (kind "completion") or `/v1/chat/completions` ("chat")."""
    draw = random.Random(f"{kind} {seed}")
    own = COMPLETION if kind == "completion" else CHAT
    fields = FIELDS | own
    first = "prompt" if kind == "completion" else "messages"
    for _ in range(count):
        body: dict[str, Any] = {first: draw.choice(fields[first]) if draw.random() < 0.2 else own[first][0]}
        body["max_tokens"] = (
            draw.choice([1, 2, 3, 4]) if draw.random() < 0.95 else draw.choice([0, -1, 2**31, "4", None])
        )
        for name in draw.sample(sorted(fields), draw.randint(0, 4)):
            if name != first:
                body[name] = draw.choice(fields[name])
        if draw.random() < 0.25:
            body[draw.choice(sorted(fields))] = strange(draw)
        if body["max_tokens"] is None:  # a random model would go on to the end of its context
            body["max_tokens"] = 4
        yield damaged(body, draw) if draw.random() < 0.08 else json.dumps(body).encode()


def strange(draw: random.Random, depth: int = 0) -> Any:
    """Return a value of any kind."""
    if depth < 3 and draw.random() < 0.25:
        if draw.random() < 0.5:
            return [strange(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        return {draw.choice(TEXTS)[:20]: strange(draw, depth + 1) for _ in range(draw.randint(0, 3))}
    return draw.choice(draw.choice([TEXTS, NUMBERS, ODD]))


def damaged(body: dict[str, Any], draw: random.Random) -> bytes:
    """Return bytes that are no such body any more."""
    whole = json.dumps(body).encode()
    cut = draw.randint(0, len(whole))
    return draw.choice(
        [
            b"",
            whole[:cut],
            whole[:cut] + bytes(draw.randrange(256) for _ in range(3)) + whole[cut:],
            whole.replace(b'"', b"'"),
            whole.replace(b"1", b"NaN", 1),
            whole.replace(b"1", b"1e999", 1),
            whole + whole,
            b"[" * 3000,
            b"[" + whole + b"]",
            json.dumps(body).encode("utf-16"),
            b"\xef\xbb\xbf" + whole,
            '{"prompt": "你好"}'.encode("gbk"),
            b'{"prompt": "\\ud83d", "max_tokens": 2}',
            b'{"prompt": "a", "prompt": 5, "max_tokens": 2}',
            b"null",
            b"5",
            b'"text"',
        ]
    )

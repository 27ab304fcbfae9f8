"""Operations of many requests in one step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tiny import idle, tiny_llm

from treewise import BeamSearchParams, SamplingParams, choices, decoding


def test_all_requests_of_a_step_are_drawn_for_at_once(monkeypatch):
    calls = []

    def choose(logits, rows, eos_token_ids):
        calls.append(len(rows))
        return choices.choose(logits, rows, eos_token_ids)

    monkeypatch.setattr(decoding, "choose", choose)
    llm = tiny_llm()
    prompts = ["Once", "Twice", "Never"]
    params = [SamplingParams(n=n, temperature=n % 2, seed=n, max_tokens=6, ignore_eos=True) for n in (1, 2, 3)]
    together = llm.generate(prompts, params)
    assert calls == [6] * 6
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    assert [[each.token_ids for each in some.outputs] for some in together] == [
        [each.token_ids for each in some.outputs] for some in alone
    ]
    calls.clear()
    llm.beam_search(prompts, BeamSearchParams(beam_width=2, max_tokens=3))
    assert not calls  # this controller chooses by itself
    idle(llm)


def test_a_cpu_needs_no_triton():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "from tiny import tiny_llm\n"
        "print(len(tiny_llm().generate(['Once'])[0].outputs[0].token_ids))"
    )
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr

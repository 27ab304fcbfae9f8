"""How large the pool is made."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from tiny import tiny_llm, tiny_model

from treewise import sizing
from treewise.sizing import bytes_per_token, default_slots, step_bytes


def test_a_pool_on_a_cpu_takes_two_gibibytes():
    model = tiny_model()
    assert bytes_per_token(model, torch.float32) == 2 * 2 * 2 * 8 * 4
    slots = default_slots(model, torch.float32, 16, 1024, 0.9)
    assert slots == (2 << 30) // 256
    assert default_slots(model, torch.float16, 64, 1024, 0.9) == 2 * slots
    assert tiny_llm(model, num_kv_slots=None, page_size=16).engine.kv.pool.num_slots in (slots, slots - 16)


def test_what_was_loaded_is_told(caplog):
    caplog.set_level(logging.INFO, "treewise")
    llm = tiny_llm(num_kv_slots=176, page_size=16, max_num_rows=50, attention="radix")
    told = llm.describe()
    assert told == told | {"model": "TinyForCausalLM", "kv_tokens": 160, "kv_bytes_per_token": 256, "max_num_rows": 50}
    assert told["weight_bytes"] == sum(weight.numel() * 4 for weight in llm.engine.runner.model.parameters())
    assert "kv_tokens 160" in caplog.text and "attention radix" in caplog.text


class OnGPU:
    """A model that says it is on a GPU."""

    def __init__(self):
        self.config, self.device = tiny_model().config, torch.device("cuda")


def test_a_pool_on_a_gpu_takes_what_is_left(monkeypatch):
    monkeypatch.setattr(sizing, "step_bytes", lambda model, rows: rows * 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60_000_000, 100_000_000))
    # Of 90 MB, 40 are in use by weights and others, and a step takes one.
    assert default_slots(OnGPU(), torch.float32, 16, 1000, 0.9) == 49_000_000 // (256 * 16) * 16
    message = (
        "gpu_memory_utilization: 0.41 of 100 MB leaves 0 B for keys and values beside 40.0 MB in use and 1.0 MB "
        "for a step of max_num_rows=1000; a page of 16 tokens takes 4.1 kB"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        default_slots(OnGPU(), torch.float32, 16, 1000, 0.41)


@pytest.mark.parametrize("share", [0, -1, 1.1])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=f"gpu_memory_utilization is {share}; it must be above 0 and at most 1"):
        default_slots(tiny_model(), torch.float32, 16, 8, share)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_is_measured():
    model = tiny_model().to("cuda")
    few, many = step_bytes(model, 16), step_bytes(model, 1600)
    assert many > 50 * few > 0
    assert default_slots(model, torch.float32, 16, 64, 0.5) > 1000

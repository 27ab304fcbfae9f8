"""Keys and values of 8 bits: half of the bytes, the tokens of a full forward with them, and a clear refusal."""

import pytest
import torch
from tiny import greedy, idle, tiny_llm, tiny_model

from treewise import SamplingParams
from treewise.attention import METHODS, AttentionSpec
from treewise.attention.cpu import CPUBackend

MODEL = tiny_model()
PROMPT = list(range(1, 60))
PROMPTS = [PROMPT, [7, 1, 9], [*PROMPT[:40], 3, 3], [5] * 40]


def fp8_llm(model=MODEL, **options):
    return tiny_llm(model, kv_cache_dtype="fp8_e4m3", **options)


def test_a_token_takes_half_the_bytes_of_16_bits_and_a_quarter_of_32():
    size = tiny_llm(MODEL).engine.runner.kv_bytes_per_token
    assert size == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, dim, bytes
    assert fp8_llm().engine.runner.kv_bytes_per_token * 4 == size
    half = tiny_model().to(torch.bfloat16)
    assert fp8_llm(half).engine.runner.kv_bytes_per_token * 2 == tiny_llm(half).engine.runner.kv_bytes_per_token


def test_the_pool_holds_as_many_more_tokens():
    slots = {name: tiny_llm(MODEL, kv_cache_dtype=name, num_kv_slots=None) for name in ("auto", "fp8_e4m3")}
    assert slots["fp8_e4m3"].engine.kv.num_slots // slots["auto"].engine.kv.num_slots == 4


def test_bytes_read_are_counted_by_the_type():
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    read = [llm.generate(PROMPT, params)[0].tree.usage.kv_bytes_read for llm in (tiny_llm(MODEL), fp8_llm())]
    assert read[0] == 4 * read[1]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_is_that_of_a_full_forward_with_rounded_keys_and_values(method):
    llm = fp8_llm(attention=method, max_num_rows=16)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, n=2))
    for prompt, request in zip(PROMPTS, outputs, strict=True):
        expected = greedy(MODEL, prompt, 12, torch.float8_e4m3fn)
        assert [output.token_ids for output in request.outputs] == [expected] * 2
    idle(llm)


def test_pages_are_copied_and_prefixes_found_again():
    llm = fp8_llm(page_size=16)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    [first] = llm.generate(PROMPT, params)
    # The second prompt leaves the first one's path in the middle of a page, the third takes up all of it.
    longer = PROMPT + first.outputs[0].token_ids
    for prompt in (PROMPT[:37], longer[:70], PROMPT):
        [warm] = llm.generate(prompt, params)
        [cold] = fp8_llm(page_size=16).generate(prompt, params)
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    idle(llm)


def test_other_types_are_refused_with_the_choices():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int4'; choose one of auto, fp8_e4m3"):
        tiny_llm(MODEL, kv_cache_dtype="int4")


def test_a_backend_that_cannot_read_them_says_so_at_the_start(monkeypatch):
    def unsupported(self, spec):
        return [f"kv_dtype is {spec.kv_dtype}"] if spec.kv_dtype != spec.dtype else []

    monkeypatch.setattr(CPUBackend, "unsupported", unsupported)
    tiny_llm(MODEL)
    with pytest.raises(ValueError, match=r"cannot serve this model: kv_dtype is torch\.float8_e4m3fn"):
        fp8_llm()


def test_gpus_that_lack_the_type_are_refused(monkeypatch):
    backend = pytest.importorskip("treewise.attention.triton")
    spec = AttentionSpec("radix", 6, 2, 8, torch.float16, torch.float8_e4m3fn, torch.device("cuda"))
    for capability, refused in (((8, 0), True), ((8, 9), False), ((9, 0), False)):
        monkeypatch.setattr(backend, "capability", lambda device, found=capability: found)
        assert bool(backend.TritonBackend().unsupported(spec)) == refused

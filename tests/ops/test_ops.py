"""The fused ops: plain torch as it always was, the kernels under the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from model_files import SMALL_MODELS, run_dense, run_tree, small_model
from tiny import greedy, idle, tiny_llm, tiny_model

from treewise import SamplingParams
from treewise.ops import Heads, gated_activation, linear, pack, rms_norm, rotate, rotate_and_store

HERE = Path(__file__).parent
has_triton = importlib.util.find_spec("triton") is not None
FP8 = torch.float8_e4m3fn


def heads(rows=4, num_heads=6, num_kv_heads=2, dim=8, **changes):
    cos, sin = torch.rand(2, rows, dim // 2)
    return Heads(torch.randn(rows, num_heads + 2 * num_kv_heads, dim), cos, sin)._replace(**changes)


@pytest.mark.skipif(not has_triton, reason="needs triton")
def test_the_kernels_are_right_under_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "interpreted_ops.py",
    ]
    done = subprocess.run(command, cwd=HERE, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


@pytest.mark.parametrize("rows", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_matrices_multiply_as_plain_ones(rows, dtype):
    weight, bias, x = torch.randn(24, 16).to(dtype), torch.randn(24).to(dtype), torch.randn(rows, 2, 16)[:, 0].to(dtype)
    packed = pack(weight)
    assert packed.shape == weight.shape and packed.dtype == dtype and pack(packed) is packed
    known = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert packed.is_mkldnn == (torch.backends.mkldnn.is_available() and known)
    assert torch.equal(packed.to_dense() if packed.is_mkldnn else packed, weight)
    for offset in (None, bias):
        torch.testing.assert_close(linear(x, packed, offset), F.linear(x, weight, offset))


def test_a_packed_model_computes_as_before():
    for model in (tiny_model(), small_model("qwen2")):
        before = run_dense(model, [3, 1, 4, 1, 5])
        names = [name for name, _ in model.named_parameters()]
        for _ in range(2):  # an engine more changes nothing
            model.pack()
            torch.testing.assert_close(run_dense(model, [3, 1, 4, 1, 5]), before, rtol=1e-4, atol=1e-4)
            assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_first_and_rounds_where_transformers_does(dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    x, residual, weight = (torch.randn(3, 40).to(dtype) for _ in range(3))
    for offset, theirs in ((False, LlamaRMSNorm(40, eps=1e-5)), (True, Gemma3RMSNorm(40, eps=1e-5))):
        theirs.weight.data = weight[0]
        normed, total = rms_norm(x, weight[0], 1e-5, offset, residual)
        assert torch.equal(total, residual + x) and torch.equal(normed, theirs(residual + x))
        normed, total = rms_norm(x, weight[0], 1e-5, offset)
        assert torch.equal(total, x) and torch.equal(normed, theirs(x))


def test_activations_are_those_of_torch():
    gate, up = torch.randn(2, 3, 10)
    stacked = torch.cat([gate, up], dim=1)
    assert torch.equal(gated_activation(stacked, "silu"), F.silu(gate) * up)
    assert torch.equal(gated_activation(stacked, "gelu_pytorch_tanh"), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_transformers(dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    ours = Heads(*(part.to(dtype) for part in heads()[:3]))
    cos, sin = (torch.cat([part, part], dim=-1)[None] for part in (ours.cos, ours.sin))
    q, k, v = ours.stacked.split((6, 2, 2), dim=1)
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    found_q, found_k, found_v = rotate(ours, 2)
    assert torch.equal(found_q, expected[0][0].transpose(0, 1)) and torch.equal(found_k, expected[1][0].transpose(0, 1))
    assert torch.equal(found_v, v)


@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64])
def test_rotated_keys_and_values_land_in_their_slots(slot_type):
    ours = heads(q_norm=torch.rand(8), k_norm=torch.rand(8), eps=1e-6)
    k, v = torch.zeros(2, 9, 2, 8)
    q = rotate_and_store(ours, k, v, torch.tensor([8, 1, 3, 0], dtype=slot_type))
    expected = rotate(ours, 2)
    assert all(torch.equal(*pair) for pair in zip((q, k[[8, 1, 3, 0]], v[[8, 1, 3, 0]]), expected, strict=True))
    assert not k[[2, 4, 5, 6, 7]].any()
    left = torch.zeros(6, *q.shape[1:])
    assert rotate_and_store(ours, k, v, torch.arange(4), out=left[:4]).data_ptr() == left.data_ptr()
    assert torch.equal(left[:4], q) and not left[4:].any()


def test_scales_divide_what_an_eight_bit_pool_gets():
    ours = heads()
    k, v = torch.zeros(2, 9, 2, 8).to(FP8)
    k_scale = torch.tensor([0.5, 2.0])
    rotate_and_store(ours, k, v, torch.arange(4), k_scale=k_scale)
    _, keys, values = rotate(ours, 2)
    assert torch.equal(k[:4].float(), (keys / k_scale[:, None]).to(FP8).float())
    assert torch.equal(v[:4].float(), values.to(FP8).float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(9, 2, 6)}, r"k and v must be .* = \[4, 10, 8\]; k is \[9, 2, 6\], v \[9, 2, 8\]"),
        ({"k": torch.zeros(9, 5, 8), "v": torch.zeros(9, 5, 8)}, "k and v must be"),
        ({"slots": torch.arange(3)}, r"slots must be int32 or int64 \[rows\] = \[4\]; they are torch.int64 \[3\]"),
        ({"slots": torch.zeros(4)}, r"they are torch.float32"),
        ({"out": torch.zeros(4, 5, 8)}, r"out must be contiguous torch.float32 \[4, 6, 8\]; it is .* \[4, 5, 8\]"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    arguments = {"k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8), "slots": torch.arange(4), **change}
    with pytest.raises(ValueError, match=message):
        rotate_and_store(heads(), **arguments)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_model_over_a_plan_and_a_pool_is_the_model_alone(name):
    """What the tests on a GPU compare with."""
    model = small_model(name)
    expected = run_dense(model, list(range(40)))
    assert (run_tree(model, range(40)) - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.gpu
class TestOnGPU:
    """Every op again in all types, and what only a GPU can show: whole models, graphs, offsets that pass 2^31."""

    DTYPES = (torch.float32, torch.float16, torch.bfloat16)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ops_agree_with_plain_torch_on_a_cpu(self, dtype):
        import op_checks

        for size in op_checks.SIZES:
            op_checks.norms_agree("cuda", dtype, size, rows=300)
        for size in (4, 1000, 1024, 14336):
            op_checks.activations_agree("cuda", dtype, size, rows=300)
            op_checks.sums_of_parts_are_normalised("cuda", dtype, size, rows=70)
        for inputs, outputs in ((4096, 6144), (14336, 4096), (576, 1000), (960, 128), (2500, 18)):
            for rows in (1, 2, 17, 50, 128, 129):
                op_checks.products_agree("cuda", dtype, inputs, outputs, rows)
        for shape in op_checks.SHAPES:
            for kv_dtype, scaled in ((dtype, False), (FP8, False), (FP8, True)):
                op_checks.heads_are_rotated_and_stored("cuda", dtype, shape, kv_dtype, scaled)

    def test_repeated_slots_and_no_rows(self):
        import op_checks

        op_checks.a_slot_that_repeats_ends_with_one_of_its_rows("cuda")
        op_checks.nothing_happens_without_rows("cuda")

    @pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 0.01), (torch.bfloat16, 0.06)])
    @pytest.mark.parametrize("name", SMALL_MODELS)
    def test_models_give_the_logits_of_a_cpu(self, name, dtype, bound):
        expected = run_dense(small_model(name), list(range(40)))
        logits = run_tree(small_model(name).to("cuda", dtype), range(40))
        assert (logits.cpu() - expected).norm() < bound * expected.norm()

    @pytest.mark.parametrize("name", SMALL_MODELS)
    def test_eight_bit_pools_give_the_logits_of_a_cpu(self, name):
        expected = run_tree(small_model(name), range(40), kv_dtype=FP8)
        logits = run_tree(small_model(name).to("cuda"), range(40), kv_dtype=FP8)
        assert (logits.cpu() - expected).norm() < 0.02 * expected.norm()

    @pytest.mark.parametrize("name", SMALL_MODELS)
    def test_a_forward_waits_for_nothing(self, name):
        def strictly(forward):
            forward()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return forward()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        model = small_model(name).to("cuda", torch.bfloat16)
        run_tree(model, range(40), around=strictly)

    @pytest.mark.parametrize("name", SMALL_MODELS)
    def test_a_captured_forward_follows_its_inputs(self, name):
        model = small_model(name).to("cuda", torch.bfloat16)

        def replayed(forward):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                forward()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = forward()
            graph.replay()
            first = logits.clone()
            assert torch.equal(first, forward())
            tokens.copy_(torch.arange(40, 80, device="cuda"))
            positions.add_(3)
            graph.replay()
            assert not torch.equal(logits, first) and torch.equal(logits, forward())
            return logits

        tokens, positions = torch.arange(40, device="cuda"), torch.arange(40, device="cuda")
        run_tree(model, tokens, positions, around=replayed)

    def test_an_engine_decodes_the_tokens_of_a_cpu(self):
        model = tiny_model(windows=(16, None))
        prompts = [[7, 1, 9], list(range(1, 60)), [*range(1, 40), 3, 3], [5] * 40]
        expected = [greedy(model, prompt, 12) for prompt in prompts]
        llm = tiny_llm(model.cuda(), device="cuda", max_num_rows=50)
        for _ in ("cold", "warm"):
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
            assert [output.outputs[0].token_ids for output in outputs] == expected
        idle(llm)

    def test_an_engine_keeps_eight_bits_through_copies_of_pages(self):
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        llm = tiny_llm(tiny_model().cuda(), device="cuda", kv_cache_dtype="fp8_e4m3")
        [first] = llm.generate(list(range(1, 60)), params)
        longer = [*range(1, 60), *first.outputs[0].token_ids]
        for prompt in (longer[:37], longer[:70], longer):  # in the middle of a page, and of what was decoded
            [request] = llm.generate(prompt, params)
            assert len(request.outputs[0].token_ids) == 20
        idle(llm)

    def test_offsets_pass_two_to_the_31(self):
        ours = Heads(*(part.cuda().half() for part in heads(rows=2, num_heads=8, num_kv_heads=8, dim=128)[:3]))
        slots = torch.tensor([5, 2**31 // 1024 + 7], device="cuda")
        k, v = (torch.zeros(2**31 // 1024 + 16, 8, 128, dtype=torch.float16, device="cuda") for _ in range(2))
        rotate_and_store(ours, k, v, slots)
        _, keys, values = rotate(ours, 8)
        assert torch.equal(v[slots], values)
        torch.testing.assert_close(k[slots], keys, rtol=2e-3, atol=2e-3)

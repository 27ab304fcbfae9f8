"""EAGLE-1 heads: the published format, keys under the engine's slots; what is decoded does not depend on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from guesses import guessing
from safetensors.torch import save_file
from test_speculate_engine import GREEDY, MODEL, PROMPTS, same, wild
from tiny import VOCABULARY, dense_states, idle, tiny_llm

from treewise import SamplingParams, generate
from treewise.llm import LLM
from treewise.speculate import sprouts
from treewise.speculate.eagle import EagleDrafter
from treewise.speculate.eagle_heads import load_eagle

SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER = 48, 4, 2, 12, 40
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
Tensors = dict[str, torch.Tensor]


def published(bias: bool = True, embedding: bool = False) -> Tensors:
    """A random head under the names that EAGLE's own training gives it."""
    torch.manual_seed(0)
    shapes = {
        "fc.weight": (SIZE, 2 * SIZE),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, SIZE),
        "layers.0.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, SIZE),
        "layers.0.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, SIZE),
        "layers.0.self_attn.o_proj.weight": (SIZE, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (INNER, SIZE),
        "layers.0.mlp.up_proj.weight": (INNER, SIZE),
        "layers.0.mlp.down_proj.weight": (SIZE, INNER),
        "layers.0.post_attention_layernorm.weight": (SIZE,),
    }
    if bias:
        shapes["fc.bias"] = (SIZE,)
    if embedding:
        shapes["embed_tokens.weight"] = (VOCABULARY, SIZE)
    return {name: torch.randn(shape) * (0.03 if name == "fc.weight" else 0.2) for name, shape in shapes.items()}


def accepted_through_noise(llm: LLM, without: LLM, prompts: Sequence[list[int]], noisy: int, greedy: int) -> int:
    """Decode forks that are mostly noise, which drafters know, so that many guesses are right; then greedily; again.

    The texts are those of an engine without guesses; how many were right is returned.
    """
    noise = SamplingParams(temperature=5.0, max_tokens=noisy, ignore_eos=True)
    close = SamplingParams(temperature=0, max_tokens=greedy, ignore_eos=True)

    async def program(root):
        branches = await generate(root.fork(3), noise)
        twins = [twin for branch in branches for twin in branch.fork(2)]
        await generate(twins, close)
        twins[0].prune()
        await generate(twins[1:], noise)
        await generate(twins[1:], close)
        return [twin.path_tokens for twin in twins[1:]]

    outputs, expected = (engine.run(program, prompts, seed=0) for engine in (llm, without))
    assert [output.value for output in outputs] == [output.value for output in expected]
    return sum(output.tree.usage.accepted_tokens for output in outputs)


def write(folder: Any, tensors: Tensors, torch_file: bool = False, **config: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if torch_file:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Turn the heads of rows [rows, heads, dim] by their positions."""
    half = HEAD_DIM // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.split(half, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def seen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence, from projections [rows, heads * dim]; gives [rows, heads * dim]."""
    q, k, v = (each.unflatten(1, (-1, HEAD_DIM)) for each in (q, k, v))
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (rotated(k), v))
    scores = torch.einsum("qhd,khd->hqk", rotated(q), k) * HEAD_DIM**-0.5
    later = torch.ones(len(q), len(q)).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(1)


@dataclass
class Plain:
    """EAGLE-1 in a few lines, for one sequence alone."""

    tensors: Tensors

    def states(self, tokens: list[int]) -> torch.Tensor:
        """The model's states that the head reads, of all tokens."""
        return dense_states(MODEL, tokens)

    def guess(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """Guess the states of all tokens but the first, from those of all but the last."""
        tensors = self.tensors
        layer = {name.removeprefix("layers.0."): tensor for name, tensor in tensors.items()}
        embedding = tensors.get("embed_tokens.weight", MODEL.embedding.weight)
        x = F.linear(torch.cat([embedding[tokens[1:]], states], -1), tensors["fc.weight"], tensors.get("fc.bias"))
        qkv = (F.linear(x, layer[f"self_attn.{name}_proj.weight"]) for name in "qkv")
        x = x + F.linear(seen(*qkv), layer["self_attn.o_proj.weight"])
        normed = F.rms_norm(x, (SIZE,), layer["post_attention_layernorm.weight"], 1e-5)
        gate, up = (F.linear(normed, layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])

    def odds(self, state: torch.Tensor) -> torch.Tensor:
        """How likely each of the model's tokens is, by a guessed state [hidden]."""
        return MODEL.logits(state[None])[0].softmax(-1)


def assisted(folder: Any, tensors: Tensors | None = None, chunk: int | None = None, **options: Any) -> LLM:
    llm = guessing(MODEL, None, **options)
    head = load_eagle(write(folder, tensors or published()), MODEL)
    engine = llm.engine
    engine.speculator.drafter = EagleDrafter(head, engine.runner, chunk or engine.scheduler.max_num_rows)
    return llm


def checked(llm: LLM, plain: Any) -> list[int]:
    """Compare what the drafter of an engine guesses with a plain computation; gives the depths of what was compared."""
    drafter: Any = llm.engine.speculator.drafter
    depths: list[int] = []
    draft = drafter.draft

    def watched(stems: Any, size: int, step: Any) -> Any:
        trees = draft(stems, size, step)
        for stem, tree in zip(stems, trees, strict=True):
            if not len(tree) or not stem.row.params.is_greedy:
                continue
            tokens, known = stem.tokens, plain.states(stem.tokens)
            states, node = known[:-1], -1
            for depth in range(1, 4):
                guessed = plain.guess(tokens, states)
                likely = plain.odds(guessed[-1])
                below = tree.parents == node
                if not below.any():
                    break
                assert likely[tree.tokens[below]].numpy() == pytest.approx(tree.probabilities[below], abs=1e-4)
                best = likely.topk(sprouts.WIDTH).values
                assert np.sort(tree.probabilities[below])[::-1] == pytest.approx(best.numpy(), abs=1e-4)
                depths.append(depth)
                inner = [child for child in below.nonzero()[0].tolist() if (tree.parents == child).any()]
                if not inner:
                    break
                # The model may have read the last token of the path before, as of a prompt that was cached.
                is_read = depth == 1 and drafter._verified(stem, step.kv) == len(tokens)
                states = torch.cat([states, known[-1:] if is_read else guessed[-1:]])
                node = max(inner, key=tree.reach.__getitem__)
                tokens = [*tokens, int(tree.tokens[node])]
        return trees

    drafter.draft = torch.inference_mode()(watched)
    return depths


@pytest.mark.parametrize("torch_file", [True, False])
@pytest.mark.parametrize(("bias", "embedding"), [(True, True), (False, False)])
def test_published_files_are_read(tmp_path, monkeypatch, torch_file, bias, embedding):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    tensors = published(bias, embedding)
    llm = assisted(tmp_path, tensors)
    head = load_eagle(write(tmp_path, {f"model.{name}": tensor for name, tensor in tensors.items()}, torch_file), MODEL)
    llm.engine.speculator.drafter = EagleDrafter(head, llm.engine.runner, 64)
    depths = checked(llm, Plain(tensors))
    llm.generate([PROMPTS[2]], GREEDY)
    assert depths.count(3) > 20


OPTIONS = [{}, {"page_size": 1}, {"num_kv_slots": 240}, {"max_num_rows": 9}, {"chunk": 9}, {"looks_ahead": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_decoded_is_what_plain_decoding_gives(tmp_path, options):
    for params in (
        GREEDY,
        SamplingParams(n=3, max_tokens=30, temperature=0.6),
        SamplingParams(n=3, max_tokens=30, temperature=5.0, ignore_eos=True),
        SamplingParams(n=2, max_tokens=25, temperature=1.1, top_p=0.8, frequency_penalty=0.3, logprobs=2),
    ):
        llm = assisted(tmp_path, **options)
        same(llm.generate(PROMPTS[:4], params), tiny_llm(MODEL).generate(PROMPTS[:4], params))
        idle(llm)


@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"num_kv_slots": 800, "tree_size": 12}], ids=str)
def test_its_keys_are_right_after_right_guesses_forks_moves_and_preemption(tmp_path, options, monkeypatch):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    tensors = published()
    llm = assisted(tmp_path, tensors, **options)
    depths = checked(llm, Plain(tensors))
    accepted = accepted_through_noise(llm, tiny_llm(MODEL), PROMPTS[:5], 24, 8)
    assert accepted > 100 and len(depths) > 200, (accepted, len(depths))
    assert "num_kv_slots" not in options or llm.engine.scheduler.num_preemptions > 0
    idle(llm)


def test_programs_that_fork_prune_and_score(tmp_path):
    llm = assisted(tmp_path)
    depths = checked(llm, Plain(published()))
    assert wild(llm) == wild(tiny_llm(MODEL))
    assert len(depths) > 30


def test_what_was_computed_is_not_computed_again(tmp_path):
    """Prompts once, whatever forks; then what the model has read in the last step, and the pending token."""
    llm = assisted(tmp_path)
    drafter: Any = llm.engine.speculator.drafter
    rows: list[int] = []
    guess = drafter.guess

    def counted(batch: Any, *rest: Any) -> Any:
        if batch.spans:
            rows.append(sum(span.end - span.start for span in batch.spans))
        return guess(batch, *rest)

    drafter.guess = counted
    prompt = list(range(1, 60))
    params = SamplingParams(n=4, max_tokens=10, temperature=0.9, ignore_eos=True)
    [output] = llm.generate([prompt], params)
    usage = output.tree.usage
    assert rows[0] == len(prompt) - 1 + 4
    assert sum(rows[1:]) <= 2 * 4 * len(rows) + usage.accepted_tokens
    [again] = llm.generate([[*prompt, 7]], params)
    assert again.tree.usage.cached_tokens >= len(prompt) and max(rows[len(rows) // 2 :]) < 30


def test_by_name(tmp_path):
    write(tmp_path, published())
    llm = tiny_llm(MODEL, speculate=f"eagle:{tmp_path}")
    same(llm.generate(PROMPTS, GREEDY), tiny_llm(MODEL).generate(PROMPTS, GREEDY))
    with pytest.raises(ValueError, match="speculate: 'eagle' needs a folder behind it, such as eagle:heads"):
        tiny_llm(MODEL, speculate="eagle")


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in published().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without("fc.weight"), {}, r"the tensor fc\.weight is missing"),
        (
            without("layers.0.self_attn.k_proj.weight"),
            {},
            r"the tensor layers\.0\.self_attn\.k_proj\.weight is missing",
        ),
        (published(), {"hidden_size": 64}, "hidden_size is 64, that of the model 48"),
        (published(), {"vocab_size": 99}, "vocab_size is 99, that of the model 128"),
        (published(), {"num_hidden_layers": 2}, "a head has one layer"),
        (
            published(),
            {"intermediate_size": 48},
            r"mlp\.up_proj\.weight have shape \(80, 48\), config\.json implies \(96",
        ),
        (
            published() | {"layers.0.input_layernorm.weight": torch.ones(SIZE)},
            {},
            r"a head of EAGLE-1 has no layers\.0\.input_layernorm\.weight",
        ),
    ],
)
def test_wrong_files_are_refused(tmp_path, tensors, config, message):
    with pytest.raises(ValueError, match=message):
        load_eagle(write(tmp_path, tensors, **config), MODEL)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no config\.json: it is not a folder of an EAGLE head"):
        load_eagle(tmp_path, MODEL)
    write(tmp_path, published())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors or pytorch_model\.bin"):
        load_eagle(tmp_path, MODEL)

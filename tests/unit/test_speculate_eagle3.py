"""EAGLE-3 heads: the published format, states of inner layers, a vocabulary of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from guesses import guessing
from test_speculate_eagle import (
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    SIZE,
    Tensors,
    accepted_through_noise,
    checked,
    seen,
    write,
)
from test_speculate_engine import GREEDY, PROMPTS, same, wild
from tiny import VOCABULARY, dense_states, greedy, idle, tiny_llm, tiny_model

from treewise import Grammar, SamplingParams
from treewise.llm import LLM
from treewise.speculate import sprouts
from treewise.speculate.drafters import prepare
from treewise.speculate.eagle import EagleDrafter
from treewise.speculate.eagle_heads import load_eagle

MODEL = tiny_model(windows=(None,) * 7)
LAYERS = [2, 3, 4]  # what heads of a model of seven layers read the inputs of
WORDS = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(5))[:100].sort().values
KEY = "eagle_aux_hidden_state_layer_ids"
DRAFTED = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(WORDS)}


def published(size: int = SIZE, words: torch.Tensor | None = WORDS, embedding: bool = False) -> Tensors:
    """A random head under the names that EAGLE's own training gives it."""
    torch.manual_seed(0)
    shapes = {
        "fc.weight": (size, 3 * SIZE),
        "midlayer.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * size),
        "midlayer.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, 2 * size),
        "midlayer.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": (INNER, size),
        "midlayer.mlp.up_proj.weight": (INNER, size),
        "midlayer.mlp.down_proj.weight": (size, INNER),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (VOCABULARY if words is None else len(words), size),
    }
    if embedding:
        shapes["embed_tokens.weight"] = (VOCABULARY, size)
    tensors = {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    if words is not None:
        tensors["d2t"] = words - torch.arange(len(words))
        tensors["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill(0, words, True)
    return tensors


@dataclass
class Plain:
    """EAGLE-3 in a few lines, for one sequence alone."""

    tensors: Tensors
    layers: list[int]

    def states(self, tokens: list[int]) -> torch.Tensor:
        """The model's states that the head reads, of all tokens."""
        entering: dict[int, torch.Tensor] = {}

        def keep(layer: int) -> Any:
            def hook(module: Any, given: Any) -> None:
                entering[layer] = given[0] if given[1] is None else given[0] + given[1]

            return MODEL.layers[layer].register_forward_pre_hook(hook)

        hooks = [keep(layer) for layer in self.layers]
        dense_states(MODEL, tokens)
        for hook in hooks:
            hook.remove()
        return F.linear(torch.cat([entering[layer] for layer in self.layers], -1), self.tensors["fc.weight"])

    def guess(self, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
        """Guess the states of all tokens but the first, from those of all but the last."""
        layer = {name.removeprefix("midlayer."): tensor for name, tensor in self.tensors.items()}

        def normed(x: torch.Tensor, name: str) -> torch.Tensor:
            return F.rms_norm(x, x.shape[-1:], layer[f"{name}.weight"], 1e-5)

        embedded = self.tensors.get("embed_tokens.weight", MODEL.embedding.weight)[tokens[1:]]
        both = torch.cat([normed(embedded, "input_layernorm"), normed(states, "hidden_norm")], -1)
        qkv = (F.linear(both, layer[f"self_attn.{name}_proj.weight"]) for name in "qkv")
        x = states + F.linear(seen(*qkv), layer["self_attn.o_proj.weight"])
        gate, up = (
            F.linear(normed(x, "post_attention_layernorm"), layer[f"mlp.{name}_proj.weight"]) for name in ("gate", "up")
        )
        return x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])

    def odds(self, state: torch.Tensor) -> torch.Tensor:
        """How likely each of the model's tokens is, by a guessed state [hidden]."""
        tensors = self.tensors
        own = F.linear(F.rms_norm(state, state.shape, tensors["norm.weight"], 1e-5), tensors["lm_head.weight"])
        if "d2t" not in tensors:
            return own.softmax(-1)
        odds = torch.zeros(VOCABULARY)
        for number, offset in enumerate(tensors["d2t"].tolist()):
            odds[number + offset] = own.softmax(-1)[number]
        return odds


def assisted(folder: Any, tensors: Tensors | None = None, config: Any = DRAFTED, **options: Any) -> LLM:
    llm = guessing(MODEL, None, **options)
    head = load_eagle(write(folder, tensors or published(), **config), MODEL)
    llm.engine.speculator.drafter = EagleDrafter(head, llm.engine.runner, llm.engine.scheduler.max_num_rows)
    return llm


NARROW = {"hidden_size": 40, "target_hidden_size": SIZE, "head_dim": HEAD_DIM}


@pytest.mark.parametrize(
    ("tensors", "config", "layers"),
    [
        (published(), DRAFTED, LAYERS),
        (published(embedding=True), DRAFTED | {"architectures": ["LlamaForCausalLM"]}, LAYERS),
        (published(words=None), {"architectures": ["Eagle3LlamaForCausalLM"]}, LAYERS),
        (published(words=None), {"draft_vocab_size": VOCABULARY}, LAYERS),
        (published(40, embedding=True), DRAFTED | NARROW, LAYERS),
        (published(), DRAFTED | {KEY: [6, 0, 1]}, [6, 0, 1]),
        (published(), DRAFTED | {"eagle_config": {KEY: [0, 2, 2]}}, [1, 3, 3]),
    ],
    ids=["part", "embedding", "whole", "all", "narrow", "inputs", "outputs"],
)
def test_published_files_are_read(tmp_path, monkeypatch, tensors, config, layers):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    llm = assisted(tmp_path, {f"model.{name}": tensor for name, tensor in tensors.items()}, config)
    depths = checked(llm, Plain(tensors, layers))
    llm.generate(PROMPTS[1:3], GREEDY)
    assert depths.count(3) > 20


def test_files_of_torch_are_read(tmp_path):
    head = load_eagle(write(tmp_path, published(), torch_file=True, **DRAFTED), MODEL)
    assert head.tokens.tolist() == WORDS.tolist()


OPTIONS = [{}, {"page_size": 1}, {"page_size": 32}, {"num_kv_slots": 240}, {"max_num_rows": 9}, {"looks_ahead": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_decoded_is_what_plain_decoding_gives(tmp_path, options):
    for params in (
        GREEDY,
        SamplingParams(n=2, max_tokens=20, temperature=5.0, ignore_eos=True),
        SamplingParams(n=2, max_tokens=20, temperature=1.1, top_p=0.8, frequency_penalty=0.3, logprobs=2),
    ):
        llm = assisted(tmp_path, **options)
        same(llm.generate(PROMPTS[1:4], params), tiny_llm(MODEL).generate(PROMPTS[1:4], params))
        idle(llm)


@pytest.mark.parametrize("options", [{}, {"page_size": 1}, {"num_kv_slots": 480, "tree_size": 12}], ids=str)
def test_its_states_are_right_after_right_guesses_forks_moves_and_preemption(tmp_path, options, monkeypatch):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    tensors = published()
    llm = assisted(tmp_path, tensors, **options)
    depths = checked(llm, Plain(tensors, LAYERS))
    accepted = accepted_through_noise(llm, tiny_llm(MODEL), PROMPTS[:3], 20, 4)
    assert accepted > 50 and len(depths) > 50, (accepted, len(depths))
    assert "num_kv_slots" not in options or llm.engine.scheduler.num_preemptions > 0
    idle(llm)


def test_guesses_behind_a_prompt_that_is_cached_leave_its_states(tmp_path, monkeypatch):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    tensors = published()
    llm = assisted(tmp_path, tensors)
    depths = checked(llm, Plain(tensors, LAYERS))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for prompt in (PROMPTS[2], PROMPTS[2], [*PROMPTS[2], 9]):
        [output] = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == greedy(MODEL, prompt, 4)
    assert output.tree.usage.cached_tokens == len(PROMPTS[2]) and len(depths) > 10


def test_programs_that_fork_prune_and_score(tmp_path):
    llm = assisted(tmp_path)
    depths = checked(llm, Plain(published(), LAYERS))
    assert wild(llm) == wild(tiny_llm(MODEL))
    assert len(depths) > 30


def test_a_grammar_of_tokens_that_the_head_has_not(tmp_path):
    """They are guessed where nothing else may come."""
    missing = next(token for token in range(97, 123) if token not in WORDS)
    params = SamplingParams(temperature=0, max_tokens=9, grammar=Grammar.regex(f"{chr(missing)}{{12}}"))
    llm = assisted(tmp_path)
    [output] = outputs = llm.generate([PROMPTS[2]], params)
    same(outputs, tiny_llm(MODEL).generate([PROMPTS[2]], params))
    assert output.outputs[0].token_ids == [missing] * 9 and output.tree.usage.accepted_tokens > 3


def test_what_lies_under_a_slot_is_counted(tmp_path):
    """One state of the head's size, not those of three layers, and a key and a value."""
    llm = assisted(tmp_path, published(40, embedding=True), DRAFTED | NARROW)
    drafter: Any = llm.engine.speculator.drafter
    counted = prepare(f"eagle:{tmp_path}", MODEL, llm.tokenizer).bytes_per_token
    assert counted == sum(pool[0].nbytes for pool in (drafter.features.states, drafter.k, drafter.v))


def test_by_name(tmp_path):
    write(tmp_path, published(), **DRAFTED)
    llm = tiny_llm(MODEL, speculate=f"eagle:{tmp_path}")
    [output] = llm.generate([PROMPTS[2]], GREEDY)
    assert output.outputs[0].token_ids == greedy(MODEL, PROMPTS[2], 40)


@pytest.mark.gpu
def test_guesses_from_graphs_are_those_without(tmp_path, monkeypatch):
    monkeypatch.setattr(sprouts, "WORTH", 0.0)
    model = tiny_model(windows=(None,) * 7).to("cuda")
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    texts, trees = [], []
    for cuda_graphs in (False, True):
        llm = guessing(model, None, device="cuda", cuda_graphs=cuda_graphs)
        drafter = EagleDrafter(load_eagle(write(tmp_path, published(), **DRAFTED), model), llm.engine.runner, 512)
        draft, own = drafter.draft, []
        drafter.draft = lambda *given, draft=draft, own=own: own.append(draft(*given)) or own[-1]
        llm.engine.speculator.drafter = drafter
        texts.append([output.outputs[0].token_ids for output in llm.generate(PROMPTS[1:4], params)])
        trees.append([(tree.tokens[:8].tolist(), tree.parents[:8].tolist()) for step in own for tree in step])
        idle(llm)
    alike = [one == other for one, other in zip(*trees, strict=True)]
    assert texts[0] == texts[1] and sum(alike) > 0.98 * len(alike)  # equally good guesses may change places
    assert drafter.graphs.num_replays > drafter.graphs.num_captures > 0


def without(name: str) -> Tensors:
    return {key: tensor for key, tensor in published().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without("midlayer.hidden_norm.weight"), {}, r"the tensor midlayer\.hidden_norm\.weight is missing"),
        (without("lm_head.weight"), {}, r"the tensor lm_head\.weight is missing"),
        (without("d2t"), {}, "the tensor d2t is missing, as draft_vocab_size is 100"),
        (published(), {"draft_vocab_size": 90}, r"d2t has shape \(100,\), config\.json implies \(90,\)"),
        (published() | {"d2t": torch.full((100,), 99)}, {}, "d2t has tokens that the model has not"),
        (published() | {"d2t": torch.zeros(100)}, {}, "d2t is not a list of tokens"),
        (published(), {"target_hidden_size": 64}, "target_hidden_size is 64, that of the model 48"),
        (published(40), NARROW, r"the tensor embed_tokens\.weight is missing"),
        (published(), {"vocab_size": 99}, "vocab_size is 99, that of the model 128"),
        (published(), {KEY: [2, 3, 7]}, "the head reads what enters layer 7, and the model has 7 layers"),
        (published(), {KEY: [2, 3]}, r"fc\.weight have shape \(48, 144\), config\.json implies \(48, 96\)"),
        (published(), {"norm_before_residual": True}, "norm_before_residual is true"),
        (published() | {"midlayer.extra": torch.ones(1)}, {}, r"a head of EAGLE-3 has no midlayer\.extra"),
    ],
)
def test_wrong_files_are_refused(tmp_path, tensors, config, message):
    with pytest.raises(ValueError, match=message):
        load_eagle(write(tmp_path, tensors, **DRAFTED | config), MODEL)


def test_a_model_of_too_few_layers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the head reads what enters layer 2, and the model has 2 layers"):
        load_eagle(write(tmp_path, published(), **DRAFTED), tiny_model())

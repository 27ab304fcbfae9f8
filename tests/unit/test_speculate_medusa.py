"""Medusa heads: the published format, what they guess, and that what is decoded does not depend on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from guesses import guessing
from safetensors.torch import load_file, save_file
from test_speculate_engine import GREEDY, MODEL, PROMPTS, same, wild
from tiny import EOS, VOCABULARY, Bytes, dense_states, idle, tiny_llm, tiny_model

from treewise import Grammar, SamplingParams
from treewise.constraint import Lexicon
from treewise.llm import LLM
from treewise.models import CausalLM
from treewise.sampler import SamplingRow, sample
from treewise.speculate import medusa
from treewise.speculate.medusa import MedusaDrafter, MedusaHeads, load_heads

SIZE = MODEL.config.hidden_size


def published(num_heads: int = 3, num_layers: int = 1, own: bool = True, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random heads under the names that Medusa's own training gives them."""
    torch.manual_seed(seed)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(SIZE, SIZE) * 0.2
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(SIZE) * 0.1
        if own:
            tensors[f"{head}.{num_layers}.weight"] = torch.randn(VOCABULARY, SIZE)
    return tensors


def write(folder: Any, tensors: dict[str, torch.Tensor], torch_file: bool = False, **config: Any) -> Any:
    config = {"base_model_name_or_path": "tiny", "medusa_num_heads": 3, "medusa_num_layers": 1} | config
    (folder / "config.json").write_text(json.dumps(config))
    if torch_file:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def expected_logits(tensors: dict[str, torch.Tensor], num_heads: int, num_layers: int, x: torch.Tensor) -> torch.Tensor:
    """What `Sequential(ResBlock, ..., Linear)` makes of rows, head by head."""
    logits = []
    for head in range(num_heads):
        y = x
        for layer in range(num_layers):
            own = f"{head}.{layer}.linear"
            y = y + F.silu(F.linear(y, tensors[f"{own}.weight"], tensors[f"{own}.bias"]))
        logits.append(F.linear(y, tensors.get(f"{head}.{num_layers}.weight", MODEL.embedding.weight)))
    return torch.stack(logits)


@pytest.mark.parametrize("torch_file", [True, False])
@pytest.mark.parametrize(("num_heads", "num_layers", "own"), [(3, 1, True), (2, 3, True), (4, 1, False)])
def test_published_files_are_read_and_written(tmp_path, torch_file, num_heads, num_layers, own):
    tensors = published(num_heads, num_layers, own)
    config = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers}
    heads = load_heads(write(tmp_path, tensors, torch_file, **config), MODEL)
    x = torch.randn(5, SIZE)
    torch.testing.assert_close(heads(x), expected_logits(tensors, num_heads, num_layers, x), atol=1e-4, rtol=1e-4)
    heads.save(tmp_path / "copy", "tiny")
    written = load_file(tmp_path / "copy" / "medusa_lm_head.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], tensors[name]) for name in tensors)
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == {"base_model_name_or_path": "tiny"} | config


def test_heads_that_share_rows_of_the_output_matrix_guess_their_tokens(tmp_path):
    words = torch.tensor([3, 5, 60, 99])
    tensors = published(own=False) | {"vocabulary": words}
    heads = load_heads(write(tmp_path, tensors), MODEL)
    x = torch.randn(2, SIZE)
    torch.testing.assert_close(heads(x), expected_logits(tensors, 3, 1, x)[..., words], atol=1e-4, rtol=1e-4)
    [tree] = MedusaDrafter(heads, VOCABULARY).draft([stem(x)], 64, cast(Any, None))
    assert set(tree.tokens.tolist()) == set(words.tolist())
    heads.save(tmp_path / "copy", "tiny")
    assert load_heads(tmp_path / "copy", MODEL).vocabulary.tolist() == words.tolist()


@dataclass(eq=False)
class StemLike:
    hidden: torch.Tensor | None
    row: SamplingRow


def stem(hidden: torch.Tensor | None, key: int = 0, constraint: Any = None, **params: Any) -> Any:
    how = SamplingParams(**{"temperature": 0.0} | params)
    return StemLike(hidden, SamplingRow(how, key, 10, output_tokens=(60, 60), constraint=constraint))


def test_trees_have_the_likeliest_guesses_of_the_newest_state(tmp_path):
    tensors = published()
    drafter = MedusaDrafter(load_heads(write(tmp_path, tensors), MODEL), VOCABULARY)
    states = torch.randn(3, SIZE)
    stems = [stem(states[:2]), stem(None), stem(states[2:])]
    trees = drafter.draft(stems, 12, cast(Any, None))
    assert [len(tree) for tree in trees] == [12, 0, 12]
    for tree, state in zip((trees[0], trees[2]), states[1:], strict=True):
        likely = expected_logits(tensors, 3, 1, state[None])[:, 0].softmax(-1)
        for node, (token, depth) in enumerate(zip(tree.tokens.tolist(), tree.depths.tolist(), strict=True)):
            assert tree.probabilities[node] == pytest.approx(float(likely[depth - 1, token]), rel=1e-3)
        products = (likely[0][:, None, None] * likely[1][:, None] * likely[2]).flatten()
        best = int(products.argmax())
        path = [best // VOCABULARY**2, best // VOCABULARY % VOCABULARY, best % VOCABULARY]
        assert path in [tree.path(node) for node in range(len(tree))]


def assisted(tmp_path: Any, tensors: dict[str, torch.Tensor] | None = None, **options: Any) -> LLM:
    heads = load_heads(write(tmp_path, tensors or published(own=False)), MODEL)
    return guessing(MODEL, MedusaDrafter(heads, VOCABULARY), **options)


@pytest.mark.parametrize("part", [False, True])
def test_guesses_are_the_tokens_that_the_noise_would_draw(tmp_path, part):
    """Head by head the arg-max at its own position, of several stems at once, penalties, bans and grammar included."""
    words = torch.tensor([3, 5, 60, 97, 98, 99, 120])
    tensors = published() if not part else published(own=False) | {"vocabulary": words}
    heads = load_heads(write(tmp_path, tensors), MODEL)
    x = torch.randn(4, SIZE) * 0.1
    lexicon = Lexicon(Bytes(), VOCABULARY, {EOS})
    constraint = lexicon.start(Grammar.regex("[ab]+"))
    stems = [
        stem(x[:1], 7, temperature=1.0),
        stem(x[1:2]),
        stem(x[2:3], 8, temperature=2.0, logit_bias={5: -100}, presence_penalty=2.0),
        stem(x[3:], 9, constraint, temperature=1.0),
    ]
    trees = MedusaDrafter(heads, VOCABULARY).draft(stems, 2000, cast(Any, None))
    logits = heads(x)
    whole = torch.full((3, 4, VOCABULARY), -1e4).index_copy(2, words, logits) if part else logits
    for own, tree, mine in zip(stems, trees, whole.transpose(0, 1), strict=True):
        path, node = [], -1
        for _ in range(3):
            node = int((tree.parents == node).nonzero()[0][0])  # the likeliest comes first
            path.append(int(tree.tokens[node]))
        rows = [
            own.row._replace(position=10 + head, constraint=None if head else own.row.constraint) for head in range(3)
        ]
        assert path == sample(mine.contiguous(), rows).tolist()
    assert chr(trees[3].tokens[0]) in "ab"


class Oracle(MedusaHeads):
    """Heads that look up what states are followed by: the offset of heads and tokens is seen in what they get right.

    Parameters
    ----------
    model : CausalLM
    tokens : list of int
        A text; of its end, nothing is known.
    """

    @torch.inference_mode()
    def __init__(self, model: CausalLM, tokens: list[int]) -> None:
        super().__init__(torch.zeros(1, 3, SIZE, SIZE), torch.zeros(1, 3, SIZE), model.logits)
        self.states = dense_states(model, tokens)
        self.follows = torch.cat([model.logits(self.states), torch.zeros(3, VOCABULARY)])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        places = torch.cdist(hidden, self.states).argmin(-1)
        assert torch.allclose(self.states[places], hidden, atol=1e-3)
        return torch.stack([self.follows[places + 1 + head] for head in range(3)])


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_the_first_head_guesses_what_follows_the_pending_token(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=41, ignore_eos=True, seed=3)
    [plain] = tiny_llm(MODEL).generate([PROMPTS[2]], params)
    heads = Oracle(MODEL, [*PROMPTS[2], *plain.outputs[0].token_ids])
    llm = guessing(MODEL, MedusaDrafter(heads, VOCABULARY))
    [output] = outputs = llm.generate([PROMPTS[2]], params)
    same(outputs, [plain])
    usage = output.tree.usage
    assert usage.steps == 11 and usage.accepted_tokens == 30  # the prompt, then 4 tokens a step
    idle(llm)


def test_at_a_temperature_more_guesses_are_right_for_the_noise_that_is_known(monkeypatch):
    """Heads that know the model's very logits are always right by the noise, and seldom without."""
    model = tiny_model()
    model.embedding.weight.mul_(0.2)  # so that many tokens are likely
    params = SamplingParams(temperature=1.0, max_tokens=41, ignore_eos=True, seed=3)
    [plain] = tiny_llm(model).generate([PROMPTS[2]], params)
    drafter = MedusaDrafter(Oracle(model, [*PROMPTS[2], *plain.outputs[0].token_ids]), VOCABULARY)
    accepted = []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(medusa, "leanings", lambda logits, rows, **vocabulary: logits.float())
        [output] = outputs = guessing(model, drafter, tree_size=8).generate([PROMPTS[2]], params)
        same(outputs, [plain])
        accepted.append(output.tree.usage.accepted_tokens)
    assert accepted[0] > 25 and accepted[1] < 15, accepted


OPTIONS = [{}, {"page_size": 1}, {"num_kv_slots": 240}, {"max_num_rows": 9}, {"looks_ahead": True}]


@pytest.mark.parametrize(("own", "options"), [(False, {}), *((True, options) for options in OPTIONS)], ids=str)
def test_what_is_decoded_is_what_plain_decoding_gives(tmp_path, options, own):
    for params in (
        GREEDY,
        SamplingParams(n=3, max_tokens=30, temperature=0.6),
        SamplingParams(n=2, max_tokens=25, temperature=1.1, top_p=0.8, frequency_penalty=0.3, logprobs=2),
    ):
        llm = assisted(tmp_path, published(own=own), **options)
        same(llm.generate(PROMPTS[1:6], params), tiny_llm(MODEL).generate(PROMPTS[1:6], params))
        idle(llm)


def test_programs_that_fork_prune_and_score(tmp_path):
    assert wild(assisted(tmp_path)) == wild(tiny_llm(MODEL))


def test_by_name(tmp_path):
    write(tmp_path, published())
    llm = tiny_llm(MODEL, speculate=f"medusa:{tmp_path}")
    same(llm.generate(PROMPTS, GREEDY), tiny_llm(MODEL).generate(PROMPTS, GREEDY))
    for name in ("medusa", "medusa:nowhere"):
        with pytest.raises(ValueError, match="speculate: 'medusa' needs a folder behind it, such as medusa:heads"):
            tiny_llm(MODEL, speculate=name)


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in published().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (without("1.0.linear.bias"), {}, r"the tensor 1\.0\.linear\.bias is missing"),
        (without("2.1.weight"), {}, r"the tensor 2\.1\.weight is missing"),
        (published(), {"medusa_num_heads": 5}, r"the tensor 3\.0\.linear\.weight is missing"),
        (published(), {"medusa_num_layers": None}, "medusa_num_layers is None, not a number of at least 1"),
        (published(), {"medusa_num_heads": 0}, "medusa_num_heads is 0, not a number of at least 1"),
        (
            published() | {"0.0.linear.weight": torch.zeros(64, 64)},
            {},
            r"0\.0\.linear\.weight has shape \(64, 64\), heads of this model have \(48, 48\)",
        ),
        (
            published() | {"0.1.weight": torch.zeros(200, SIZE)},
            {},
            r"0\.1\.weight has shape \(200, 48\), heads of this model have \(128, 48\)",
        ),
        (published(own=False) | {"vocabulary": torch.zeros(3)}, {}, "vocabulary is not a list of tokens"),
        (published(own=False) | {"vocabulary": torch.tensor([5, 999])}, {}, "tokens that the model has not"),
    ],
)
def test_wrong_files_are_refused(tmp_path, tensors, config, message):
    with pytest.raises(ValueError, match=message):
        load_heads(write(tmp_path, tensors, **config), MODEL)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_damaged_and_missing_files_are_refused(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=r"no config\.json: it is not a folder of Medusa heads"):
        load_heads(tmp_path, MODEL)
    write(tmp_path, published())
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no medusa_lm_head\.safetensors or medusa_lm_head\.pt"):
        load_heads(tmp_path, MODEL)
    (tmp_path / name).write_bytes(b"\x10\0\0\0\0\0\0\0 this is nothing")
    with pytest.raises(ValueError, match=f"{name} is truncated or no file of tensors"):
        load_heads(tmp_path, MODEL)


def test_a_file_of_something_else_is_refused(tmp_path):
    write(tmp_path, cast(Any, [torch.zeros(3)]), torch_file=True)
    with pytest.raises(ValueError, match="holds something else than tensors by name"):
        load_heads(tmp_path, MODEL)

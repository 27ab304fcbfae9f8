"""EAGLE: one decoder layer guesses the model's next hidden state, whose token the model's own output head names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from treewise.attention import TreeSpec, plan_tree, run_plan
from treewise.batch import Batch
from treewise.config import ModelConfig
from treewise.kv import Copy, KVManager, Slots
from treewise.layers import Attend, Attention, Embedding, GatedMLP, Linear, RMSNorm, Rotary
from treewise.models import CausalLM, read_config
from treewise.models.decoder import PARTS
from treewise.models.tokenizer import read_json
from treewise.ops import Heads, rotate_and_store
from treewise.plan.data import upload
from treewise.runner import Runner
from treewise.speculate.drafter import Stem, Step
from treewise.speculate.features import Features
from treewise.speculate.sprouts import Sprout, grow, lacking
from treewise.speculate.tensor_files import read_tensors
from treewise.speculate.trees import EMPTY, TokenTree

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Files of heads, the first found counts."""
_EMBEDDING = "embed_tokens.weight"


class EagleHead(nn.Module):
    """A decoder layer over a token and the hidden state of the token before, joined; it has no norm in front.

    Parameters
    ----------
    config : ModelConfig
        Of one layer.
    embedding : Embedding
    fc_bias : bool
        Whether the map that joins both has a bias.

    Notes
    -----
    Li et al., *EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty*, 2024.
    """

    def __init__(self, config: ModelConfig, embedding: Embedding, fc_bias: bool) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.attention = Attention(config, 0)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset)
        self.mlp = GatedMLP(config)
        self.rope = Rotary(config.layer_ropes[0])
        self.embedding = embedding

    def forward(self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Guess the hidden state of each row.

        Parameters
        ----------
        tokens : Tensor [rows], int64
        states : Tensor [rows, hidden]
            Of the token before each, behind the model's last norm; or a guess of it.
        positions : Tensor [rows], int64
            Of the tokens before.
        attend : Attend

        Returns
        -------
        Tensor [rows, hidden]
            As it would be behind the model's last norm.
        """
        x = self.fc(torch.cat([self.embedding(tokens), states], dim=-1))
        seen = self.attention(x, self.rope(positions, x.dtype), attend)
        normed, stream = self.mlp_norm.add(seen, x)
        guessed: Tensor = self.mlp(normed) + stream
        return guessed


def load_eagle(folder: Path, model: CausalLM) -> EagleHead:
    """Read a head for a model from a folder in the published format of EAGLE-1.

    It holds ``config.json``, that of a model with one layer, and ``model.safetensors`` or ``pytorch_model.bin`` with
    the tensors ``fc.weight``, perhaps ``fc.bias``, ``layers.0.self_attn.*``, ``layers.0.mlp.*``,
    ``layers.0.post_attention_layernorm.weight`` and perhaps ``embed_tokens.weight``; without the last, the head shares
    the model's embedding.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If a file is damaged, lacks something, or the head does not fit the model.
    """
    raw = read_json(folder / "config.json")
    if not raw:
        raise FileNotFoundError(f"speculate: {folder} has no config.json: it is not a folder of an EAGLE head")
    config = read_config(raw)
    theirs = {name: getattr(config, name) for name in ("hidden_size", "vocab_size")}
    for name, own in theirs.items():
        if own != (wanted := getattr(model.config, name)):
            raise ValueError(f"speculate: {folder / 'config.json'}: {name} is {own}, that of the model {wanted}")
    if config.num_layers != 1 or config.sandwich_norms:
        raise ValueError(f"speculate: {folder / 'config.json'}: a head has one layer, with norms as in Llama")
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(folder, WEIGHTS).items()}
    if any(name.startswith("midlayer.") for name in tensors):
        raise ValueError(
            f"speculate: {folder} is a head of EAGLE-3 (it has tensors midlayer.*), which reads states of inner "
            "layers; only heads of EAGLE-1 can be used"
        )
    embedding = model.embedding
    if _EMBEDDING in tensors:
        with torch.device("meta"):
            embedding = Embedding(config.vocab_size, config.hidden_size)
    with torch.device("meta"):
        head = EagleHead(config, embedding, "fc.bias" in tensors)
    used = set()
    for name, parameter in list(head.named_parameters()):
        if not parameter.is_meta:
            continue
        module, _, kind = name.rpartition(".")
        prefix = "" if module in ("fc", "embedding") else "layers.0."
        sources = [f"{prefix}{source}.{kind}" for source in PARTS.get(module, (module,))]
        if missing := [source for source in sources if source not in tensors]:
            raise ValueError(f"speculate: {folder}: the tensor {missing[0]} is missing")
        weight = torch.cat([tensors[source] for source in sources])
        if weight.shape != parameter.shape:
            raise ValueError(
                f"speculate: {folder}: {' and '.join(sources)} have shape {tuple(weight.shape)}, "
                f"config.json implies {tuple(parameter.shape)}"
            )
        setattr(head.get_submodule(module), kind, nn.Parameter(weight.to(model.device, model.dtype), False))
        used.update(sources)
    unused = sorted(name for name in tensors if name not in used and not name.endswith("inv_freq"))
    if unused:
        raise ValueError(f"speculate: {folder}: a head of EAGLE-1 has no {', '.join(unused[:5])}")
    head.rope.to(model.device)
    return head.eval()


class EagleDrafter:
    """Lets an EAGLE head go on, a level of the trees a forward.

    The head's own key and value of a token lie under the slot that the engine has for the token; they follow from the
    token and the hidden state of the one before. The first token of a path has none. The keys of guesses are made with
    guessed states, and are made again with the model's own once a guess was right.
    """

    wants_hidden = False

    def __init__(self, head: EagleHead, engine: Runner, max_num_rows: int) -> None:
        config = head.config
        for module in head.modules():
            if isinstance(module, Linear):
                module.pack()
        self.head = head
        self.engine = engine
        self.max_num_rows = max_num_rows
        shape = (engine.k.shape[1], config.num_kv_heads, config.head_dim)
        self.k, self.v = torch.zeros(2, *shape, dtype=engine.dtype, device=engine.device)
        self.features = Features(engine)
        self._made = np.zeros(shape[0], bool)  # whether a slot has keys of the head, for what the model has put there
        engine.watchers.append(self._forget)
        engine.followers.append(self._follow)

    @torch.inference_mode()
    def draft(self, stems: Sequence[Stem], size: int, step: Step) -> list[TokenTree]:
        """See `Drafter.draft`."""
        self.engine.move(step.kv)
        batch, sources, sprouts = Batch(), [], []
        for stem in stems:
            slots = step.path_slots(stem)
            if len(slots) < 2 or self._verified(stem, step.kv) < len(slots) - 1:
                continue
            # The last row is wanted anyhow, and is made again when the model has read its token.
            lacks = 1 + np.flatnonzero(~self._made[slots[1:]])[:1]
            added, row = lacking(batch, stem, min([len(slots) - 1, *lacks.tolist()]), step, self.max_num_rows)
            sources += [slots[start - 1 : end - 1] for start, end in added]
            if row is not None:
                sprouts.append(Sprout(stem, batch.want_logits(row)))
        if batch.num_rows:
            states = self.features.states[self.features.place(np.concatenate(sources))]
            guessed = self.guess(batch, step.kv, states)
            self._made[batch.store_slots(step.kv)] = True
            newest = guessed[self.features.place(np.array([batch.logit_rows[sprout.place] for sprout in sprouts]))]
            logits = self.engine.model.logits(newest)
            grow(sprouts, logits, batch, step, _Levels(self, step.kv, newest, sprouts).forward)
        trees = {sprout.stem: sprout.tree() for sprout in sprouts}
        return [trees.get(stem, EMPTY) for stem in stems]

    def guess(self, batch: Batch, kv: KVManager, states: Tensor) -> Tensor:
        """Guess the states of the tokens of a batch, each from the state of the token before; store their keys."""
        config, engine = self.head.config, self.engine
        spec, slots = _without_first_tokens(*batch.tree_spec(kv))
        plan = plan_tree(
            spec,
            engine.attention,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            slots=slots,
            page_size=engine.page_size,
            dtype=engine.dtype,
            device=engine.device,
            window=config.layer_windows[0],
        )
        known = np.stack((batch.tokens(), batch.positions() - 1, batch.store_slots(kv)))
        tokens, positions, places = upload({"rows": known}, engine.device)["rows"]

        def attend(layer: int, heads: Heads) -> Tensor:
            q = rotate_and_store(heads, self.k, self.v, places)
            return cast(Tensor, run_plan(plan, q, self.k, self.v, scale=config.attention_scale))

        return cast(Tensor, self.head(tokens, states, positions, attend))

    @staticmethod
    def _verified(stem: Stem, kv: KVManager) -> int:
        """Return how many tokens of a path the model has read, from the first."""
        path = kv.forest.path(stem.node)
        return next((node.start + node.computed for node in path if node.computed < len(node.tokens)), stem.node.end)

    def _forget(self, slots: Slots, hidden: Tensor) -> None:
        self._made[slots] = False

    def _follow(self, copy: Copy) -> None:
        self._made[copy.target] = self._made[copy.source]
        source, target = self.features.place(copy.source), self.features.place(copy.target)
        for pool in (self.k, self.v):
            pool[target] = pool[source]


class _Levels:
    """The states that a head has guessed behind the newest nodes of trees, level by level."""

    def __init__(self, drafter: EagleDrafter, kv: KVManager, states: Tensor, sprouts: Sequence[Sprout]) -> None:
        self.drafter = drafter
        self.kv = kv
        self.states = states
        self.first = {sprout: row for row, sprout in enumerate(sprouts)}  # in the states

    def forward(self, batch: Batch, sprouts: Sequence[Sprout]) -> Tensor:
        """Go on behind the newest nodes: return the logits behind them."""
        above = [self.first[s] + s.above.index(s.parents[node]) for s in sprouts for node in s.newest]
        self.states = self.drafter.guess(batch, self.kv, self.states[self.drafter.features.place(np.array(above))])
        begins = np.cumsum([0, *(len(sprout.newest) for sprout in sprouts)])
        self.first = dict(zip(sprouts, begins.tolist(), strict=False))
        return self.drafter.engine.model.logits(self.states)


def _without_first_tokens(spec: TreeSpec, slots: Slots) -> tuple[TreeSpec, Slots]:
    """Leave out the first token of each root, which has no key of the head."""
    roots = spec.parent < 0
    begins = np.cumsum(spec.length) - spec.length
    offsets = spec.query_offset - roots[spec.query_node]
    rest = TreeSpec(spec.parent, spec.length - roots, spec.query_node, offsets)
    return rest, np.delete(slots, begins[roots])

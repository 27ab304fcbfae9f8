"""One rank's share of a decoder: some of the heads, of the MLP's columns and of the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from treewise.config import ModelConfig, check_integer
from treewise.layers import Attention, Embedding, GatedMLP, Linear
from treewise.models import CausalLM
from treewise.ops import linear
from treewise.parallel.group import Group

if TYPE_CHECKING:
    from treewise.parallel.ranks import Ranks


def check_size(config: ModelConfig, size: int) -> None:
    """Refuse a number of ranks over which a model cannot be shared out.

    Each rank has as many query heads as any other, all of them of KV heads that it has too. Where there are more ranks
    than KV heads, several have the same KV head.

    Raises
    ------
    ValueError
        It names the numbers that can be.
    """
    check_integer("tensor_parallel_size", size, 1)
    if not _divides(config, size):
        choices = ", ".join(str(number) for number in range(1, config.num_heads + 1) if _divides(config, number))
        raise ValueError(
            f"tensor_parallel_size is {size}; a model of {config.num_heads} heads, {config.num_kv_heads} KV heads and "
            f"{config.intermediate_size} columns of its MLP can be shared out over {choices} ranks"
        )


def _divides(config: ModelConfig, size: int) -> bool:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return not (heads % size or config.intermediate_size % size or (kv_heads % size and size % kv_heads))


class SummedLinear(Linear):
    """A linear map of columns that ranks share out; what each makes of its own is summed.

    Parameters
    ----------
    whole : Linear
        One rank's, whose form this has.
    group : Group
    """

    def __init__(self, whole: Linear, group: Group) -> None:
        super().__init__(whole.in_features, whole.out_features, bias=whole.bias is not None)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Transform this rank's columns of rows ``x`` ``[rows, inputs]``; gives what all make ``[rows, outputs]``."""
        return self.group.sum(linear(x, self.weight, self.bias))

    def parts(self, x: Tensor) -> Tensor:
        """Transform likewise: what is summed over ranks is left in no parts."""
        return self.forward(x)


class SharedEmbedding(Embedding):
    """A table of token ids from `first` on; each id is in the table of one rank.

    Parameters
    ----------
    num_tokens, size, first : int
    group : Group
    """

    def __init__(self, num_tokens: int, size: int, first: int, group: Group) -> None:
        super().__init__(num_tokens, size)
        self.first = first
        self.group = group

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the rows of ``tokens`` ``[rows]``, whichever rank has them: ``[rows, size]``."""
        own = tokens - self.first
        place = own.clamp(0, self.num_embeddings - 1)
        return self.group.sum(F.embedding(place, self.weight).masked_fill_((own != place)[:, None], 0))


class ParallelLM(CausalLM):
    """One rank's share of a decoder; all ranks compute each forward together.

    To whoever runs it, it is a decoder with fewer heads and a narrower MLP: `config` is that of the share. Norms are
    whole on each rank, and so is the residual stream. Token ids are shared out in runs of equally many, the last of
    which is padded. Logits come together on rank 0; elsewhere they are zeros.

    Parameters
    ----------
    config : ModelConfig
        Of the whole model.
    group : Group
        The ranks.

    Raises
    ------
    ValueError
        If the model cannot be shared out over so many, see `check_size`.

    Attributes
    ----------
    whole : ModelConfig
    group : Group
    ranks : Ranks
        On rank 0 what tells the others what to do.
    """

    ranks: Ranks

    def __init__(self, config: ModelConfig, group: Group) -> None:
        check_size(config, group.size)
        super().__init__(
            replace(
                config,
                num_heads=config.num_heads // group.size,
                num_kv_heads=max(1, config.num_kv_heads // group.size),
                intermediate_size=config.intermediate_size // group.size,
            )
        )
        self.whole = config
        self.num_ranks = group.size
        self.group = group
        self.num_tokens = -(-config.vocab_size // group.size)  # of the vocabulary, with padding
        self.embedding = SharedEmbedding(self.num_tokens, config.hidden_size, group.rank * self.num_tokens, group)
        if not config.tie_embeddings:
            self.head = Linear(config.hidden_size, self.num_tokens, bias=False)
        for module in self.modules():
            if isinstance(module, Attention):
                module.output = SummedLinear(module.output, group)
            if isinstance(module, GatedMLP):
                module.down = SummedLinear(module.down, group)

    def project(self, hidden: Tensor) -> Tensor:
        """See `CausalLM.project`; what ranks other than the first return means nothing."""
        shares = self.group.gather(linear(hidden, self.head_weight))
        if not shares:
            return hidden.new_zeros((len(hidden), self.whole.vocab_size))
        ends = [self.whole.vocab_size - rank * self.num_tokens for rank in range(self.group.size)]
        return torch.cat([share[:, : max(0, end)] for share, end in zip(shares, ends, strict=True)], dim=1)

    def checkpoint_tensors(self) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
        """See `CausalLM.checkpoint_tensors`: the tensors are those of the whole model."""
        with torch.device("meta"):
            yield from CausalLM(self.whole).checkpoint_tensors()

    def share(self, source: str, tensor: Tensor) -> Tensor:
        """Return what this rank has of a checkpoint tensor, a view of it where it can be."""
        module, _, kind = source.rpartition(".")
        rank, size = self.group.rank, self.group.size
        match module.rpartition(".")[2]:
            case "q_proj" | "gate_proj" | "up_proj":
                return tensor.chunk(size)[rank]
            case "k_proj" | "v_proj":
                shares = min(size, self.whole.num_kv_heads)
                return tensor.chunk(shares)[rank * shares // size]
            case "o_proj" | "down_proj" if kind == "bias":
                return tensor if rank == 0 else torch.zeros_like(tensor)  # it is added once
            case "o_proj" | "down_proj":
                return tensor.chunk(size, dim=1)[rank]
            case "embed_tokens" | "lm_head":
                own = tensor[rank * self.num_tokens : (rank + 1) * self.num_tokens]
                return F.pad(own, (0, 0, 0, missing)) if (missing := self.num_tokens - len(own)) else own
        return tensor

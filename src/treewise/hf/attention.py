"""Attention of one layer of a Transformers model: over a tree where its rows make one, dense elsewhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treewise.attention import run_plan
from treewise.hf.trees import Step, flat


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    treewise_step: Step | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend for one layer, as Transformers' attention interface has it.

    Parameters
    ----------
    module : Module
        The attention layer.
    query : [batch, heads, queries, head_dim]
    key, value : [batch, kv_heads, keys, head_dim]
    attention_mask : Tensor, optional
        Of bool, True where a query sees a key, or numbers to add; [batch, 1, queries, keys].
    scaling, softcap : float, optional
        Factor of the scores, and their cap.

    Returns
    -------
    Tensor [batch, queries, heads, head_dim], None

    Raises
    ------
    ValueError
        If the layer has attention sinks, which this attention cannot add.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if kwargs.get("s_aux") is not None:
        raise ValueError("attn_implementation='treewise' has no attention sinks (s_aux); choose 'eager'")
    plan = None
    if treewise_step is not None and kwargs.get("position_bias") is None and not query.requires_grad:
        plan = treewise_step.plan(query, key, value, attention_mask)
    if plan is not None:
        pools = (flat(keys) for keys in (key, value))
        out = run_plan(plan, query[:, :, 0], *pools, scale=scaling, soft_cap=softcap)
        assert isinstance(out, Tensor)
        return out[:, None], None
    if softcap is not None:
        return _capped(module, query, key, value, attention_mask, scaling, softcap, **kwargs), None
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return out, None


def _capped(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **_: Any,
) -> Tensor:
    """Attend densely under a soft cap, which no fused attention of torch has."""
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    rows, columns = scores.shape[2:]
    if mask is None and rows > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril(columns - rows)
    if mask is not None and mask.dtype == torch.bool:
        # NOTE: not -inf; queries on padding see nothing, and their NaN would spread.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask
    weights = torch.nn.functional.dropout(scores.float().softmax(-1).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous()

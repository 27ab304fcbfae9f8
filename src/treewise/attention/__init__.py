"""Backends: capability report, plan, run, and the store of keys and values; Triton kernels of attention live here.

>>> import torch
>>> tree = TreeSpec(parent=[-1, 0, 0], length=[40, 2, 3], query_node=[1, 2])
>>> plan = plan_tree(tree, "deft:flatten", num_heads=4, num_kv_heads=2, head_dim=8)
>>> q, k, v = torch.randn(2, 4, 8), torch.randn(45, 2, 8), torch.randn(45, 2, 8)
>>> run_plan(plan, q, k, v).shape
torch.Size([2, 4, 8])
"""

from __future__ import annotations

import torch

from treewise.attention.backend import AttentionBackend, AttentionSpec, Scoring
from treewise.attention.cpu import CPUBackend
from treewise.attention.reference import ReferenceBackend
from treewise.plan import METHODS, Plan, TreeSpec, plan_tree
from treewise.plan.devices import default_backend

__all__ = [
    "BACKENDS",
    "METHODS",
    "AttentionBackend",
    "AttentionSpec",
    "Plan",
    "TreeSpec",
    "get_backend",
    "plan_tree",
    "run_plan",
    "store_kv",
]

BACKENDS = ("reference", "cpu", "triton", "hopper")
"""``"hopper"`` is ``"triton"`` with a kernel of its own for wide items, and the default where there is such a GPU."""


def get_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """Find a backend by name, or the one of a device.

    Raises
    ------
    ValueError
        If there is no backend of this name, or it needs a package that is not there.
    """
    name = name or default_backend(device)
    match name:
        case "reference":
            return ReferenceBackend()
        case "cpu":
            return CPUBackend()
        case "triton" | "hopper":
            # Imported here because Triton is not there on every machine, and reads TRITON_INTERPRET when imported.
            try:
                from treewise.attention.triton import HopperBackend, TritonBackend
            except ModuleNotFoundError as error:
                raise ValueError(f"backend {name!r} needs the package triton, which is not installed") from error
            return HopperBackend() if name == "hopper" else TritonBackend()
    raise ValueError(f"backend is {name!r}; choose one of {', '.join(BACKENDS)}")


def run_plan(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from every query of a plan's tree to the keys on its path.

    Parameters
    ----------
    plan : Plan
        Made by `plan_tree`.
    q : [queries, heads, head_dim]
        Queries in the order of the tree's ``query_node``.
    k, v : [slots, kv_heads, head_dim]
        The pool of keys and values.
    scale : float, optional
        Factor of the scores, above 0; default ``head_dim ** -0.5``.
    soft_cap : float, optional
        Above 0: scores become ``soft_cap * tanh(scores / soft_cap)``, as Gemma 2 has them.
    k_scale, v_scale : Tensor [kv_heads], float32, optional
        Factors of the stored keys and values, as `store_kv` divided by them.
    return_lse : bool
        Also return the natural logarithm of each query's sum of exponentials over all that it sees: exact to single
        precision, but for ``medusa`` on a GPU, whose scores pass through memory in q's dtype.
    backend : str, optional
        One of `BACKENDS`; default what the method's name asks for, else the device's.

    Returns
    -------
    Tensor [queries, heads, head_dim], in q's dtype; with ``return_lse`` also Tensor [queries, heads], float32

    Raises
    ------
    ValueError
        If a tensor's shape, dtype or device does not fit the plan, scale is not above 0, or the backend cannot run it.
    """
    _check(plan, q, k, v)
    scale = plan.head_dim**-0.5 if scale is None else scale
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} is {value}; it must be above 0")
    _check_factors(k, k_scale, v_scale)
    chosen = get_backend(backend or plan.backend, q.device)
    if chosen.name not in plan.accepted_by:
        if reasons := chosen.unsupported(AttentionSpec.of(plan)):
            raise ValueError(f"backend {chosen.name!r} cannot run this plan: {'; '.join(reasons)}")
        plan.accepted_by.add(chosen.name)
    out, lse = chosen.run(plan, q, k, v, Scoring(scale, soft_cap, k_scale, v_scale), return_lse)
    return out if not return_lse or lse is None else (out, lse)


def store_kv(
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new rows into the pool.

    Parameters
    ----------
    k_new, v_new : [rows, kv_heads, head_dim]
        Keys and values of the rows.
    k, v : [slots, kv_heads, head_dim]
        The pool, written in place.
    slots : [rows], int64
        Where each row goes. A slot that repeats, such as the scratch slot, ends with one of its rows.
    k_scale, v_scale : Tensor [kv_heads], float32, optional
        What keys and values are divided by on their way into an 8-bit pool; what does not fit becomes the largest
        number that does.
    """
    if slots.dtype != torch.int64:
        raise ValueError(f"slots must be int64; they are {slots.dtype}")
    if not k_new.shape == v_new.shape == (len(slots), *k.shape[1:]):
        raise ValueError(
            f"k_new and v_new must be [rows, kv_heads, head_dim] = {[len(slots), *k.shape[1:]]}; "
            f"they are {list(k_new.shape)} and {list(v_new.shape)}"
        )
    _check_factors(k, k_scale, v_scale)
    get_backend(None, k.device).store((k_new, v_new), (k, v), slots, (k_scale, v_scale))


def _check(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    shape = (plan.num_rows, plan.num_heads, plan.head_dim)
    if tuple(q.shape) != shape:
        raise ValueError(f"q must be [queries, heads, head_dim] = {list(shape)}; it is {list(q.shape)}")
    if k.shape != v.shape or tuple(k.shape[1:]) != (plan.num_kv_heads, plan.head_dim):
        expected = ["slots", plan.num_kv_heads, plan.head_dim]
        raise ValueError(
            f"k and v must be [slots, kv_heads, head_dim] = {expected}; k is {list(k.shape)}, v {list(v.shape)}"
        )
    if len(k) < plan.num_slots:
        raise ValueError(f"k and v hold {len(k)} slots; the plan reads up to slot {plan.num_slots - 1}")
    if q.dtype != plan.dtype or not k.dtype == v.dtype == plan.kv_dtype:
        raise ValueError(
            f"q must be of the plan's dtype {plan.dtype}, k and v of its kv_dtype {plan.kv_dtype}; "
            f"they are {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not q.device.type == k.device.type == v.device.type == plan.device.type:
        raise ValueError(f"q, k and v must be on {plan.device}; they are on {q.device}, {k.device}, {v.device}")


def _check_factors(k: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
    for name, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if factor is not None and (factor.dtype, *factor.shape) != (torch.float32, k.shape[1]):
            raise ValueError(
                f"{name} must be float32 [kv_heads] = [{k.shape[1]}]; it is {factor.dtype} {list(factor.shape)}"
            )

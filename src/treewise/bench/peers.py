"""Other implementations of attention that ours is timed beside. None is installed with treewise; one may be missing."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from treewise.attention import TreeSpec
from treewise.bench.contender import Contender, Job
from treewise.bench.trees import Ints, at_node_ends, indptr, paths, visible_lengths, visible_slots

COPY_LIMIT = {"cuda": 16 * 2**30, "cpu": 2 * 2**30}
"""Most bytes of keys and values that are copied for a peer that cannot share them."""


def search_path(folder: Path) -> None:
    """Let peers be imported from a folder and from the folders in it, after all that is installed."""
    if not folder.is_dir():
        raise ValueError(f"peers-path: {str(folder)!r} is no folder")
    sys.path += [str(path) for path in (folder, *sorted(folder.iterdir())) if path.is_dir()]


class Sdpa:
    """PyTorch's scaled_dot_product_attention: a whole prompt at once, else each query over a copy of its path."""

    name = "sdpa"

    def missing(self, device: torch.device) -> str | None:
        """See `Contender`."""
        return None

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """See `Contender`."""
        if tree.num_nodes == 1 and np.array_equal(tree.query_offset, np.arange(tree.num_tokens)):
            whole = [x[: tree.num_tokens].transpose(0, 1)[None].contiguous() for x in (q, k, v)]
            return Job(lambda: self._attend(*whole, causal=True)[0].transpose(0, 1))
        lengths = visible_lengths(tree)
        copied = 2 * int(lengths.sum()) * k[0].nbytes
        if copied > COPY_LIMIT[q.device.type]:
            raise ValueError(f"would copy {copied / 2**30:.0f} GiB of keys and values, a path a query")
        seen = visible_slots(tree)
        calls, order = [], []
        for length in np.unique(lengths):
            rows = np.flatnonzero(lengths == length)
            slots = torch.from_numpy(np.stack([seen[row] for row in rows])).to(q.device)
            keys, values = (x[slots].transpose(1, 2).contiguous() for x in (k, v))
            calls.append((q[torch.from_numpy(rows).to(q.device)][:, :, None], keys, values))
            order.append(rows)

        def run() -> torch.Tensor:
            parts = [self._attend(*call)[:, :, 0] for call in calls]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return Job(run, rows=torch.from_numpy(np.concatenate(order)))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        half = q.is_cuda and q.dtype != torch.float32
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if half else contextlib.nullcontext():
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


class _Imported:
    """A peer whose code is a module for CUDA devices."""

    module: str

    def missing(self, device: torch.device) -> str | None:
        """See `Contender`."""
        if device.type != "cuda":
            return "needs a CUDA device"
        try:
            importlib.import_module(self.module)
        except Exception as error:
            return f"cannot import {self.module}: {error}"
        return None

    def _load(self) -> Any:
        return importlib.import_module(self.module)


class FastTree(_Imported):
    """FastTree's Triton kernels, with the tile sizes that its planner chooses; ``fasttree.py`` of its artifact."""

    name, module = "fasttree", "fasttree"

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """See `Contender`."""
        inner = np.isin(tree.query_node, tree.parent)
        if (tree.parent < 0).sum() > 1 or inner.any() or not at_node_ends(tree):
            raise ValueError("serves one tree with its queries at the ends of leaves")
        fasttree, group_size = self._load(), q.shape[1] // k.shape[1]
        starts = indptr(tree.length).tolist()
        readers: list[list[int]] = [[] for _ in range(tree.num_nodes)]
        for query, path in enumerate(paths(tree)):
            for node in path:
                readers[node].append(query)

        def plan() -> tuple[Any, Any]:
            nodes = [_Node(*facts) for facts in zip(tree.parent.tolist(), tree.length.tolist(), readers, strict=True)]
            for number, node in enumerate(nodes):
                node.id = number
                if node.parent >= 0:
                    nodes[node.parent].num_children += 1
            settings = fasttree.FastTreeParams()
            settings.set_values(0.66, 0.33, 0.1)
            settings.set_q_tile_sizes([max(1, 64 // group_size), max(1, 16 // group_size)])
            settings.set_kv_tile_sizes([32, 32])
            settings.set_kv_group_num(group_size)
            sizes, least, most = [1024, 128], [132, 528], [132, 132]  # of KV splits; when to split more, merge tiles
            shape = (len(q), q.shape[1], k.shape[1], q.shape[2])
            with contextlib.redirect_stdout(io.StringIO()):
                made, _ = fasttree.fasttree_preparation(nodes, starts, *shape, sizes, least, most, settings)
            return made, settings

        made, settings = plan()
        out, scale = torch.empty_like(q), q.shape[2] ** -0.5

        def run() -> torch.Tensor:
            fasttree.fasttree_decode(q, k, v, out, *made, settings.TSQs, settings.TSKs, scale)
            return out

        return Job(run, plan)


@dataclass
class _Node:
    """A node as FastTree's planner reads it."""

    parent: int
    seqlen: int
    requests: list[int]
    num_children: int = 0
    id: int = 0


class _FlashInfer(_Imported):
    module = "flashinfer"

    def _planner(self, wrapper: Any, tables: Sequence[Any], q: torch.Tensor, k: torch.Tensor) -> Callable[[], object]:
        """Plan once, and return how to do it again."""
        shape, types = (q.shape[1], k.shape[1], q.shape[2], 1), {"q_data_type": q.dtype, "kv_data_type": k.dtype}
        plan = partial(wrapper.plan, *tables, *shape, sm_scale=q.shape[2] ** -0.5, **types)
        plan()
        return plan


class FlashInferDecode(_FlashInfer):
    """FlashInfer's batched decoding on tensor cores over pages of one token: each query reads its whole path."""

    name = "flashinfer-decode"

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """See `Contender`."""
        workspace = torch.empty(2**29, dtype=torch.uint8, device=q.device)
        wrapper = self._load().BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        pages = (*ragged(visible_slots(tree), q.device), torch.ones(len(q), dtype=torch.int32, device=q.device))
        plan = self._planner(wrapper, pages, q, k)
        pool = (k[:, None], v[:, None])
        return Job(lambda: wrapper.run(q, pool), plan)


class FlashInferCascade(_FlashInfer):
    """FlashInfer's cascade, one level of attention a level of the tree, merged level by level.

    It is held to its FA2 kernels: on Hopper it would choose FA3, which here neither splits keys nor packs heads.
    """

    name = "flashinfer-cascade"
    most_levels = 16

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """See `Contender`."""
        if not at_node_ends(tree):
            raise ValueError("serves trees with queries at the ends of nodes")
        way = paths(tree)
        levels = max(map(len, way))
        if levels > self.most_levels:
            raise ValueError(f"{levels} levels, a kernel each; at most {self.most_levels} are tried")
        order = sorted(range(len(way)), key=way.__getitem__)
        parts = [
            self._level(tree, np.array([way[query][level] if level < len(way[query]) else -1 for query in order]))
            for level in range(levels)
        ]
        tables = [[torch.from_numpy(x).int().to(q.device) for x in column] for column in zip(*parts, strict=True)]
        workspace = torch.empty(2**30, dtype=torch.uint8, device=q.device)
        wrapper = self._load().MultiLevelCascadeAttentionWrapper(levels, workspace, "NHD")
        for one in wrapper._batch_prefill_wrappers:
            one._backend = one._requested_backend = "fa2"
        plan = self._planner(wrapper, tables, q, k)
        rows = torch.tensor(order)
        sorted_q, pool = q[rows.to(q.device)], torch.stack((k, v), dim=1)[:, :, None]
        return Job(lambda: wrapper.run(sorted_q, pool), plan, rows)

    def _level(self, tree: TreeSpec, node: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """From the node of each row, or -1, to the row starts, page starts, pages and lengths of a level's runs."""
        first = np.flatnonzero((np.diff(node, prepend=-2) != 0) | (node < 0))
        run, starts = node[first], indptr(tree.length)
        slots = [np.arange(starts[n], starts[n + 1]) if n >= 0 else np.arange(0) for n in run.tolist()]
        lengths = np.array([len(part) for part in slots])
        return np.append(first, len(node)), indptr(lengths), np.concatenate(slots), np.minimum(lengths, 1)


class SGLang(_Imported):
    """SGLang's Triton decoding: each query reads its whole path, in up to 16 splits."""

    name, module = "sglang", "sglang.srt.layers.attention.triton_ops.decode_attention"
    splits = 16

    def prepare(self, tree: TreeSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Job:
        """See `Contender`."""
        decode = self._load().decode_attention_fwd
        starts, slots = ragged(visible_slots(tree), q.device)
        slots = slots.long()
        shape = (*q.shape[:2], self.splits)
        parts, lse = (torch.empty(size, device=q.device) for size in ((*shape, q.shape[2]), shape))
        wanted = 4 * torch.cuda.get_device_properties(q.device).multi_processor_count // (len(q) * k.shape[1])
        splits = torch.full((len(q),), min(max(1, wanted), self.splits), dtype=torch.int32, device=q.device)
        out, scale = torch.empty_like(q), q.shape[2] ** -0.5

        def run() -> torch.Tensor:
            decode(q, k, v, out, starts, slots, parts, lse, splits, self.splits, scale, 1.0, 1.0)
            return out

        return Job(run)


PEERS: dict[str, Contender] = {
    peer.name: peer for peer in (Sdpa(), FastTree(), FlashInferDecode(), FlashInferCascade(), SGLang())
}


def ragged(runs: Sequence[Ints], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Put runs one after the other: where each starts, and all of them, as int32."""
    starts = torch.from_numpy(indptr([len(run) for run in runs]))
    return starts.int().to(device), torch.from_numpy(np.concatenate(runs)).int().to(device)

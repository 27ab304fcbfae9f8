"""One device: weights, KV pool, one forward."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from treewise.attention import Plan, plan_tree, run_plan, store_kv
from treewise.batch import Batch
from treewise.kv import Copy, KVManager
from treewise.models import CausalLM

Plans = dict[int | None, Plan]
"""The plan of each sliding window that the model's layers have; ``None`` is full attention."""


class Runner:
    """Holds a model and its key and value tensors, and computes batches of rows.

    Parameters
    ----------
    model : CausalLM
    attention : str
        Method of attention, see `treewise.attention.METHODS`.
    num_slots, page_size : int
        Of the pool that hands out the slots.

    Attributes
    ----------
    k, v : Tensor
        [layers, slots, kv_heads, head_dim]
    """

    def __init__(self, model: CausalLM, attention: str, num_slots: int, page_size: int) -> None:
        self.model = model
        self.attention = attention
        self.page_size = page_size
        config = model.config
        self.device, self.dtype = model.device, model.dtype
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        # NOTE: zeros, not empty: a masked score is multiplied with whatever value lies there, and NaN would survive.
        self.k = torch.zeros(shape, dtype=self.dtype, device=self.device)
        self.v = torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.k[:, 0].numel() * self.k.element_size()

    def kv_bytes(self, plans: Plans) -> int:
        """Return the bytes of keys and values that a forward under `plans` reads."""
        windows = self.model.config.layer_windows
        return sum(plan.io(layers=windows.count(window)).kv for window, plan in plans.items())

    def kv_bytes_of_path(self, length: int) -> int:
        """Return the bytes of keys and values that one query at the end of `length` tokens has to read."""
        windows = self.model.config.layer_windows
        seen = sum(length if window is None else min(length, window) for window in windows)
        return seen * self.kv_bytes_per_token // len(windows)

    def plan(self, batch: Batch, kv: KVManager) -> Plans:
        """Plan the step's attention once for each kind of layer."""
        config = self.model.config
        spec, slots = batch.tree_spec(kv)
        return {
            window: plan_tree(
                spec,
                self.attention,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                slots=slots,
                page_size=self.page_size,
                dtype=self.dtype,
                device=self.device,
                window=window,
            )
            for window in set(config.layer_windows)
        }

    @torch.inference_mode()
    def forward(self, batch: Batch, plans: Plans, kv: KVManager) -> Tensor:
        """Compute `batch` and store the keys of its rows.

        Returns
        -------
        Tensor
            Logits of ``batch.logit_rows``, float32 [logit rows, vocabulary].
        """
        for copy in kv.take_copies():
            self._copy(copy)
        slots = self._upload(batch.store_slots(kv))
        windows = self.model.config.layer_windows
        scale = self.model.config.attention_scale

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            store_kv(k, v, self.k[layer], self.v[layer], slots)
            return run_plan(plans[windows[layer]], q, self.k[layer], self.v[layer], scale=scale)

        logit_rows = self._upload(np.asarray(batch.logit_rows, np.int64))
        return self.model(self._upload(batch.tokens()), self._upload(batch.positions()), attend, logit_rows)

    def _copy(self, copy: Copy) -> None:
        source, target = self._upload(copy.source), self._upload(copy.target)
        for pool in (self.k, self.v):
            pool[:, target] = pool[:, source]

    def _upload(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(self.device)

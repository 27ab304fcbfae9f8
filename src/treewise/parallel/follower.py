"""The other ranks: each does with its share of the model what rank 0 says."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore

from treewise.models import load_decoder
from treewise.parallel.group import CONNECTING, Group
from treewise.parallel.model import ParallelLM
from treewise.parallel.orders import Ask, Begin, Call, Forward, PlanHearer, read
from treewise.plan.data import upload_together
from treewise.runner import Runner
from treewise.sparsity.observation import Seen


@dataclass(frozen=True)
class Errand:
    """What a rank has to know when it starts.

    Attributes
    ----------
    port : int
        Of the store of rank 0, on this machine.
    rank, size : int
    device : str
    model : str
        A folder, or a shape, see `treewise.models.load_decoder`.
    dtype : str or torch.dtype
    """

    port: int
    rank: int
    size: int
    device: str
    model: str
    dtype: str | torch.dtype


def load_share(name: str, dtype: str | torch.dtype, device: torch.device, group: Group) -> ParallelLM:
    """Load this rank's share of a model, reading no other weights; all ranks come back from it together."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    model = load_decoder(name, dtype=dtype, device=device, build=partial(ParallelLM, group=group))
    assert isinstance(model, ParallelLM)
    group.total(0)
    return model


@torch.inference_mode()
def follow(model: ParallelLM) -> None:
    """Do what rank 0 says until it says nothing more."""
    group = model.group
    runners: dict[int, tuple[Runner, PlanHearer]] = {}
    kept: dict[int, Any] = {}
    while message := group.hear():
        order, dropped = read(message, kept)
        for number in dropped:
            runners.pop(number, None)
            kept.pop(number, None)
        match order:
            case Begin(number, arguments):
                runner = Runner(model, *arguments)
                runners[number] = runner, PlanHearer(runner.device)
                group.total(runner.weight_bytes)
            case Ask(subject_number, function, arguments):
                subject = model if subject_number is None else runners[subject_number][0]
                group.least(function(subject, *arguments) or 0)
            case Call(number, function, arguments, result):
                if (returned := function(runners[number][0], *arguments)) is not None:
                    kept[result] = returned
            case Forward(number, step, news, num_drawn, seen, shows):
                runner, plans = runners[number]
                drawn = None
                if num_drawn is not None:
                    drawn = group.broadcast(torch.empty(num_drawn, dtype=torch.int64, device=runner.device))
                takers = [Seen(kept[each], *upload_together(arrays, runner.device)) for each, *arrays in seen]
                hidden = runner.take(step._replace(plans=plans.hear(news)), drawn, takers)
                if shows:
                    group.broadcast(hidden)
                model.logits(hidden)


def main() -> None:
    """Be a rank of the process that started this one, which writes an `Errand` to standard input and keeps it open."""
    errand: Errand = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    store = TCPStore("127.0.0.1", errand.port, is_master=False, timeout=CONNECTING)
    try:
        device = torch.device(errand.device)
        store.set(f"started {errand.rank}", "")
        group = Group(store, errand.rank, errand.size, device, is_local=True)
        follow(load_share(errand.model, errand.dtype, device, group))
    except BaseException:
        store.set(f"error {errand.rank}", traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing comes but the end
    os._exit(0)

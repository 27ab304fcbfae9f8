"""Times many requests: to a server, or with KV sparsity beside the same with dense keys and values."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import Parameter

from treewise.bench.compare import measure
from treewise.bench.curves import draw
from treewise.bench.loads import Demand, Load, about, compare_engines, publish
from treewise.bench.measure import describe_machine
from treewise.bench.remote import Remote
from treewise.bench.runs import Facts
from treewise.bench.subject import Subject, read_methods
from treewise.charts import check_matplotlib
from treewise.config import SparsityOptions
from treewise.sparsity.policy import KVSparsity

DENSE = "dense"


def serve(
    *,
    attention: str = "auto",
    json_file: Annotated[Path | None, Parameter("--json")] = None,
    png: Path | None = None,
    demand: Annotated[Demand | None, Parameter("*", group="Requests")] = None,
    remote: Annotated[Remote | None, Parameter("*", group="A server")] = None,
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
    subject: Annotated[Subject | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Time requests of equal lengths: to a server (--url), or in this process, dense and with policies of KV sparsity.

    A server may be any that speaks OpenAI's API. It is asked for streams, so many at a time or as they come by chance
    (--rate), and tokens, waits, gaps and errors are what a client sees of them; --model is its name of the model, the
    first that it lists if left out. Other flags of model and engine are the server's own.

    In this process --kv-sparsity novita,pyramidkv are two policies. Every request decodes one sampled sequence of
    random tokens, whatever ends the text. No two prompts are alike, so that the prefix cache is off: all slots in use
    are those of requests that are under way. What a policy keeps does not depend on whether the text makes sense; what
    is decoded from it is judged elsewhere.

    Parameters
    ----------
    attention
        The method of attention.
    json_file
        Write the result here too.
    png
        Draw tokens a second and waits here; needs matplotlib.
    """
    demand = demand or Demand()
    if png is not None:
        check_matplotlib()
    if remote is not None and remote.url is not None:
        if sparsity is not None or (subject is not None and subject != Subject(model=subject.model)):
            raise ValueError("url: KV sparsity and the engine are the server's own; of the model its name alone counts")
        result, title = _ask_server(demand, remote, None if subject is None else subject.model, json_file)
    elif remote is not None:
        raise ValueError("url: what a server is asked needs the URL of one")
    else:
        result, title = _compare_policies(demand, attention, sparsity, subject or Subject(), json_file)
    if png is not None:
        draw(result, title, png)


def _ask_server(demand: Demand, remote: Remote, model: str | None, json_file: Path | None) -> tuple[Facts, str]:
    """Return the result, and whom it is of."""
    if demand.against != "nothing" or demand.kv_tokens is not None:
        raise ValueError(f"{'kv_tokens' if demand.kv_tokens else 'against'}: with --url it is the server's own matter")
    demand.check()
    remote.check(demand)
    remote.run(Load("warm", 1, remote.prompts_of(demand, 1, first=0), 2), 0, model)

    def run(load: Load, seed: int) -> Facts:
        return remote.run(load, seed, model)

    rows = measure(remote.loads(demand), {"server": run}, demand.repeats)
    file = remote.dataset_jsonl
    asked = asdict(remote) | {"dataset_jsonl": None if file is None else str(file), "model": model}
    facts = {"bench": "serve", **asked, "machine": describe_machine(torch.device("cpu")), "results": rows}
    title = f"{model or 'a model'} at {remote.url}"
    return publish(demand, facts, title, json_file), title


def _compare_policies(
    demand: Demand, attention: str, sparsity: SparsityOptions | None, subject: Subject, json_file: Path | None
) -> tuple[Facts, str]:
    """Return the result, and whom it is of."""
    sparsity = sparsity or SparsityOptions()
    methods = read_methods(attention)
    if len(methods) > 1:
        raise ValueError(f"attention: {attention!r} is several methods; policies are compared with one")
    demand.check(subject)
    settings, config = sparsity.settings(), subject.config()
    names = dict.fromkeys((sparsity.kv_sparsity or DENSE).split(","))
    policies = {name: KVSparsity.named(name, **settings) for name in names if name != DENSE}
    for name, policy in policies.items():
        if reasons := policy.refusals(config):
            raise ValueError(f"kv_sparsity: {name}: {'; '.join(reasons)}")
    loaded = subject.load()
    common = {"attention": methods[0], "enable_prefix_caching": False}
    options = {name: {**common, "kv_sparsity": policy} for name, policy in {DENSE: None, **policies}.items()}
    rows = compare_engines(demand, subject, loaded, options)
    keys = {name: policy.key for name, policy in policies.items()}
    facts = {"bench": "serve", "policies": keys, "results": rows, **about(subject, loaded)}
    pool = "room for all" if demand.kv_tokens is None else f"a pool of {demand.kv_tokens:,} tokens"
    title = f"{pool}, {subject.model}, {facts['dtype']}, {facts['machine']['device']}"
    return publish(demand, facts, title, json_file), title

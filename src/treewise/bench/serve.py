"""Times many requests with KV sparsity beside the same with dense keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from treewise.bench.curves import draw
from treewise.bench.loads import Demand, compare_engines, publish
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
    sparsity: Annotated[SparsityOptions | None, Parameter("*", group="KV sparsity")] = None,
    subject: Annotated[Subject | None, Parameter("*", group="Model and engine")] = None,
) -> None:
    """Time requests of equal lengths, dense and with policies of KV sparsity: --kv-sparsity novita,pyramidkv are two.

    Every request decodes one sampled sequence of random tokens, whatever ends the text. No two prompts are alike, so
    that the prefix cache is off: all slots in use are those of requests that are under way. What a policy keeps does
    not depend on whether the text makes sense; what is decoded from it is judged elsewhere.

    Parameters
    ----------
    attention
        The method of attention.
    json_file
        Write the result here too.
    png
        Draw tokens a second and waits here; needs matplotlib.
    """
    demand, sparsity, subject = demand or Demand(), sparsity or SparsityOptions(), subject or Subject()
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
    if png is not None:
        check_matplotlib()
    loaded = subject.load()
    common = {"attention": methods[0], "enable_prefix_caching": False}
    options = {name: {**common, "kv_sparsity": policy} for name, policy in {DENSE: None, **policies}.items()}
    rows = compare_engines(demand, subject, loaded, options)
    keys = {name: policy.key for name, policy in policies.items()}
    result = publish(demand, subject, loaded, {"bench": "serve", "policies": keys, "results": rows}, json_file)
    if png is not None:
        draw(result, png)

"""treewise decodes trees: prompts that branch, from the program down to the attention kernel.

>>> from treewise import LLM, SamplingParams
>>> [story] = LLM("smollm2-135m").generate("Once upon", SamplingParams(n=4, max_tokens=8))
>>> len(story.outputs), len(story.tree.nodes)
(4, 5)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treewise.awaitables import call, decode, gather, generate, score
    from treewise.branch import Branch, DeadBranchError, keep
    from treewise.budgets import BudgetExceeded, Cancelled, limit
    from treewise.config import BeamSearchParams, SamplingParams, Speculation
    from treewise.controller import BeamSearch, Controller, Greedy, Rows, Sample, TreeView
    from treewise.grammar import Grammar
    from treewise.live import LiveTree
    from treewise.llm import LLM, RequestsFailed
    from treewise.sparsity import KVSparsity
    from treewise.streams import stream

__version__ = "0.1.0"

# Imported on first use: the command line answers `--help` without loading torch.
_HOMES = {
    "treewise.awaitables": ("call", "decode", "gather", "generate", "score"),
    "treewise.branch": ("Branch", "DeadBranchError", "keep"),
    "treewise.budgets": ("BudgetExceeded", "Cancelled", "limit"),
    "treewise.config": ("BeamSearchParams", "SamplingParams", "Speculation"),
    "treewise.controller": ("BeamSearch", "Controller", "Greedy", "Rows", "Sample", "TreeView"),
    "treewise.grammar": ("Grammar",),
    "treewise.live": ("LiveTree",),
    "treewise.llm": ("LLM", "RequestsFailed"),
    "treewise.sparsity": ("KVSparsity",),
    "treewise.streams": ("stream",),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "BeamSearch",
    "BeamSearchParams",
    "Branch",
    "BudgetExceeded",
    "Cancelled",
    "Controller",
    "DeadBranchError",
    "Grammar",
    "Greedy",
    "KVSparsity",
    "LiveTree",
    "RequestsFailed",
    "Rows",
    "Sample",
    "SamplingParams",
    "Speculation",
    "TreeView",
    "call",
    "decode",
    "gather",
    "generate",
    "keep",
    "limit",
    "score",
    "stream",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

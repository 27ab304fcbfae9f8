"""Branch handles: the tree of one request as its program sees it."""

from treewise.branch.handle import Branch, DeadBranchError, keep, prune
from treewise.branch.tree import BranchTree

__all__ = ["Branch", "BranchTree", "DeadBranchError", "keep", "prune"]

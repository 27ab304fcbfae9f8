"""What all charts have in common."""

from __future__ import annotations

import importlib.util

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#999933")
"""Told apart by people who see few colours too."""


def check_matplotlib() -> None:
    """Raise ValueError if there is no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("png: needs matplotlib; pip install 'treewise[bench]'")

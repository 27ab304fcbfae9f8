"""Tests that need a device this machine lacks, or minutes that nobody asked for, are skipped, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multi_gpu", 2)):
            if item.get_closest_marker(marker) and devices < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA device(s), this machine has {devices}"))
        if item.get_closest_marker("stress") and "stress" not in config.option.markexpr:
            item.add_marker(pytest.mark.skip(reason="takes minutes: pytest -m stress"))

"""Reading a shared prefix once must show, on a CPU too."""

from __future__ import annotations

import time

import pytest
import torch

from treewise.attention import TreeSpec, plan_tree, run_plan


@pytest.fixture
def one_thread():
    """Give torch one thread, so that processor time does not depend on what else the machine does."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_twenty_branches_on_a_long_prompt_are_three_times_faster_than_twenty_sequences(one_thread):
    tree = TreeSpec([-1] + [0] * 20, [2000] + [30] * 20, range(1, 21))
    q, k, v = torch.randn(20, 9, 64), torch.randn(tree.num_tokens, 3, 64), torch.randn(tree.num_tokens, 3, 64)
    plans = [plan_tree(tree, method, num_heads=9, num_kv_heads=3, head_dim=64) for method in ("deft:flatten", "radix")]
    best = [float("inf")] * 2
    for _ in range(15):
        for place, plan in enumerate(plans):
            started = time.process_time()
            run_plan(plan, q, k, v)
            best[place] = min(best[place], time.process_time() - started)
    assert best[1] > 3 * best[0], f"flatten {best[0] * 1e3:.2f} ms, radix {best[1] * 1e3:.2f} ms"

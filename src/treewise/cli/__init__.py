"""The verbs `generate`, `search`, `run`, `serve`, `strategies`, `train-medusa`, `bench`, `eval`, `models`, `env`."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from treewise import __version__


def _default(value: Any) -> str | None:
    """Return a default as help shows it; none where it is nothing."""
    return None if value in (None, "", (), {}) else str(value)


app = App(
    name="treewise",
    default_parameter=Parameter(negative_iterable=(), show_default=_default),
    help="Decode trees with a language model: every shared key and value is read once.",
    version=__version__,
    result_action="return_value",
)
# The verbs are named, not imported: `treewise --help` loads neither torch nor a model.
app.command("treewise.cli.generate:generate", help="Continue a prompt, or answer it with --chat.")
app.command("treewise.cli.search:search", help="Solve a prompt with a search strategy, and draw its tree.")
app.command("treewise.cli.search:strategies", help="List the strategies of search and their parameters.")
app.command("treewise.cli.run:run", help="Run a program of your own over many prompts.")
app.command("treewise.cli.serve:serve", help="Serve a model over OpenAI's API.")
app.command("treewise.cli.train:train_medusa", help="Train heads that guess some tokens ahead, for speculation.")
app.command("treewise.cli.info:models", help="List the built-in models and the converted copies in the cache.")
app.command(
    "treewise.cli.info:env", help="Print versions, devices, settings and folders; or --plan for a model on some GPUs."
)
bench = App(name="bench", help="Timed runs; the last line of standard output is JSON.")
bench.command("treewise.bench.attention:attention", help="Attention methods on named trees.")
bench.command("treewise.bench.fit:fit", help="Fit what picks the attention method on this device.")
bench.command("treewise.bench.tree:tree", help="Whole branching requests, step by step.")
bench.command("treewise.bench.throughput:throughput", help="Many requests side by side.")
bench.command("treewise.bench.serve:serve", help="Many requests side by side, with KV sparsity and without.")
bench.command("treewise.replicas.comparison:replicas", help="Routers in front of replicas, simulated.")
bench.command("treewise.bench.speculate:speculate", help="Decoding with guesses of what follows, and without.")
app.command(bench)
quality = App(name="eval", help="What a model's answers are worth when it keeps less.")
quality.command("treewise.cli.evaluate:kv", help="Policies of KV sparsity against the dense cache.")
quality.command("treewise.cli.evaluate:heads", help="Which heads of a model need their tokens, for budgets by head.")
app.command(quality)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line; what the user got wrong ends in one line on standard error and exit code 2."""
    # Threads that spin while they wait make a step several times slower wherever another program wants the same cores.
    # OpenMP reads this when torch is imported, which no verb has done yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _keep_freed_memory()
    try:
        app(arguments, exit_on_error=False, print_error=False)
    except BrokenPipeError:
        # The reader of our output has gone, as `head` does; Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        sys.exit(130)
    except (CycloptsError, ValueError, OSError) as error:
        print(f"treewise: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _keep_freed_memory() -> None:
    """Have the C library hand out large blocks again that were freed, as its ``MALLOC_`` variables would.

    Each step makes and drops arrays of megabytes, which glibc else takes from the system, page fault by page fault, and
    gives back: 5,000 beams took an eighth longer then, on a GPU.
    """
    thresholds = {"MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20), "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20)}
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    for name, (option, size) in thresholds.items():
        if mallopt is not None and name not in os.environ:
            mallopt(option, size)

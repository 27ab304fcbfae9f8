"""What the published numbers leave out, by arithmetic and by what was measured here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from treewise.reproduce.report import Cell, Section, Table
from treewise.reproduce.sparsity.quality import full_layers, loss_of_question, summary
from treewise.reproduce.sparsity.serving import Cell as Serving
from treewise.reproduce.sparsity.serving import fits, times_dense
from treewise.reproduce.study import Results

LENGTHS = (4500, 7000, 18_000, 30_000)
"""Tokens of a sequence: that of the account's table 1 when it ends, and those of its long questions."""
WINDOWS = (512, 1024, 1536)


def held(tokens: int, window: int, full: int, layers: int) -> float:
    """Return the share of a dense cache that is held where some layers are full and others keep a window.

    Examples
    --------
    >>> round(held(4500, 1024, 3, 32), 3)
    0.3
    """
    return (full * tokens + (layers - full) * min(window, tokens)) / (layers * tokens)


def window_for(tokens: int, full: int, layers: int, compression: float) -> int:
    """Return the most tokens that sparse layers can keep for a compression over all layers; 0 if there is none.

    Examples
    --------
    >>> window_for(7000, 3, 32, 10), window_for(30_000, 3, 32, 10), window_for(7000, 4, 32, 10)
    (48, 207, 0)
    """
    return max(0, round((layers * tokens / compression - full * tokens) / (layers - full)))


def section(results: Results, published: Mapping[str, Any]) -> Section:
    """Say where the published protocol misleads, and what changes."""
    account, theirs = published["account"], published["follow_up"]
    layers, full = account["layers"], account["full_layers"]
    compression = account["long_questions_compression"]
    counted: list[list[Cell]] = [
        [tokens, window, tokens / window, held(tokens, window, full, layers), 1 / held(tokens, window, full, layers)]
        for tokens in LENGTHS
        for window in WINDOWS
    ]
    needed: list[list[Cell]] = [
        [tokens, *(window_for(tokens, some, layers, compression) for some in (0, 1, full))] for tokens in LENGTHS[1:]
    ]
    tables = [
        Table(
            "Compression of sparse layers, and of the cache",
            ["tokens", "window", "times, sparse layers only", "held of all layers", "times, all layers"],
            counted,
            f"{full} of {layers} layers full, by arithmetic. Bytes held are over all layers everywhere in this report.",
        ),
        Table(
            f"Windows that compress {compression} times over all layers",
            ["tokens", *(f"full layers: {some}" for some in (0, 1, full))],
            needed,
            f"Tokens that a sparse layer may keep at most, of {layers} layers.",
        ),
    ]
    return Section(
        "Where the published protocol misleads",
        "\n".join(
            [
                f"- **Compression that counts sparse layers only.** With {full} full layers of {layers}, more than "
                f"{compression} times over the whole cache leaves a sparse layer "
                f"{window_for(7000, full, layers, compression)} tokens of 7,000 and "
                f"{window_for(30_000, full, layers, compression)} of 30,000: windows that the account mentions "
                "nowhere. Either fewer layers were full there, or only sparse ones were counted.",
                _regimes(results, account),
                "- **Whom it is compared with.** A fork of vLLM 0.5.1 is measured against vLLM 0.6.1.p2, another "
                "engine in more than its cache. Here both are one engine, apart from the policy.",
                "- **A median hides who waits.** The account has medians of the first token's time alone. The table of "
                "every engine has the 90th and 99th percentile too, and the time between tokens, which rises as more "
                "requests fit.",
                _question(results),
                _layers(results),
                "- **Short prompts are not compressed.** Prompts of MMLU and MMLU-Pro with five worked examples are "
                "mostly no longer than 1,000 to 1,500 tokens, and the windows of the follow-up are "
                f"{theirs['windows'][-1]:,} to {theirs['windows'][0]:,}: there is little to give up, and little is "
                "lost. Budgets that are shares of the prompt compress every prompt.",
                "- **Means hide tasks.** Tables here name the worst task of each policy beside the mean.",
            ]
        ),
        tables,
    )


def _regimes(results: Results, account: Mapping[str, Any]) -> str:
    measured = {
        cell: result
        for key, result in results.items()
        if (cell := Serving.of(key)) is not None and "tokens_per_s" in result
    }
    said = (
        f"- **Starved and ample pools.** {account['times_dense']} times the throughput is what a pool gives in which "
        "the dense engine has no room for more requests; nothing is said of one with room."
    )
    parts = []
    for pool in ("starved", "ample"):
        ratios = {
            cell.level: ratio
            for cell, facts in measured.items()
            if (cell.pool, cell.engine) == (pool, "novita")
            and (ratio := times_dense(measured, cell))
            and (pool == "ample" or not fits(cell, facts))
        }
        if ratios:
            words = ", ".join(f"{ratios[level]:.2f} at {level}" for level in sorted(ratios))
            parts.append(f"{pool}: {words}")
    return said + (f" Here novita over dense is, {'; '.join(parts)} requests at a time." if parts else "")


def _layers(results: Results) -> str:
    said = (
        "- **What full layers cost.** Whether the bytes of full layers would do more as larger windows of all layers "
        "is asked by neither source."
    )
    if (summed := summary(results, "grid")) is None:
        return said
    facts, cells = summed
    most, *_, fewest = facts["policies"]  # full layers
    table = {
        (cell["policy"], cell["budget"]): cell for cell in cells if (cell["mode"], cell["task"]) == ("aware", "all")
    }
    words = [
        f"{table[fewest, budget]['top1']:.2f} with {table[fewest, budget]['held']:.2f} of the bytes and "
        f"{table[most, budget]['top1']:.2f} with {table[most, budget]['held']:.2f}"
        for budget in sorted(facts["budgets"])
    ]
    return said + (
        f" Top-1 agreement with {full_layers(fewest)} and with {full_layers(most)} full layers of {facts['layers']}, "
        f"for windows of {', '.join(f'{budget:g}' for budget in sorted(facts['budgets']))} of the text: "
        f"{'; '.join(words)}."
    )


def _question(results: Results) -> str:
    said = (
        "- **Whether the question is in the window.** Scores of the last queries know what will be asked only where "
        "the question ends the prompt. In a conversation, or for a prompt that several questions share, it comes after."
    )
    if (summed := summary(results, "policies")) is None:
        return said
    losses = loss_of_question(summed[1])
    name = next((policy for policy, _ in losses if policy.startswith("novita")), None)
    words = [
        f"{aware:.2f} and {agnostic:.2f} with a budget of {budget:g}"
        for (policy, budget), (aware, agnostic) in losses.items()
        if policy == name
    ]
    return said + (f" {name} has a top-1 agreement, in the window and not, of {', '.join(words)}." if words else "")

"""What the DeFT paper and its repository published, with the table or figure that each number stands in.

DeFT: Decoding with Flash Tree-Attention for Efficient Tree-Structured LLM Inference, arXiv:2404.00242v4; the repository
is LINs-lab/DeFT at 728525e. All of it was measured on an A100 with 80 GB, float16, unless it says otherwise.
"""

from __future__ import annotations

COLUMNS = {
    "few-shot-20": "few-shot, b = 20",
    "few-shot-30": "few-shot, b = 30",
    "few-shot-50": "few-shot, b = 50",
    "sorting": "sorting",
    "document": "document",
    "keyword": "keyword",
    "set": "set",
    "star-32": "speculation, star, t = 32",
    "star-64": "speculation, star, t = 64",
    "star-128": "speculation, star, t = 128",
    "star-256": "speculation, star, t = 256",
}
"""The workloads of the paper's tables 5, 6, 16 and 17, in their order."""

OOM = None
"""A cell that the paper marks as out of memory."""


def _row(*values: float | None) -> dict[str, float | None]:
    return dict(zip(COLUMNS, values, strict=True))


DECODE_SECONDS = {
    "flash_decoding": _row(78.96, 131.19, 191.09, 429.65, 241.20, 32.75, 51.76, 574.50, 1128.45, OOM, OOM),
    "medusa": _row(52.58, 103.90, 144.07, 380.87, 236.86, 33.52, 50.10, 263.40, 483.35, 924.97, 1881.51),
    "radix": _row(12.37, 14.08, 16.54, 104.79, 69.61, 11.25, 17.03, 54.66, 69.75, 108.56, 188.66),
    "deft:flatten": _row(9.98, 10.99, 12.48, 94.67, 66.95, 10.90, 16.10, 42.23, 46.60, 56.96, 84.27),
}
"""Table 5: decode latency in seconds, Llama-3-8B. The sum of forwards: no planning, slots, branching or prompt."""

ATTENTION_SECONDS = {
    "flash_decoding": _row(43.49, 66.10, 110.09, 160.67, 105.80, 12.14, 19.96, 340.09, 692.88, OOM, OOM),
    "medusa": _row(3.93, 7.51, 9.57, 38.64, 29.10, 2.62, 3.96, 22.40, 26.31, 41.10, 68.28),
    "radix": _row(5.99, 7.30, 9.96, 39.37, 24.69, 3.11, 5.13, 25.73, 40.47, 76.10, 145.43),
    "deft:node": _row(10.59, 10.62, 10.85, 42.96, 33.29, 6.16, 9.58, 34.59, 34.41, 34.96, 40.56),
    "deft:node_chunk": _row(8.52, 9.69, 13.45, 49.63, 36.37, 4.77, 7.40, 14.54, 20.28, 32.57, 57.26),
    "deft:flatten": _row(3.47, 4.07, 5.87, 28.41, 21.45, 2.57, 3.83, 13.15, 16.79, 24.46, 41.78),
}
"""Tables 6 and 16: attention latency in seconds, all layers. For t = 256 the paper prints node's and flatten's
numbers the other way round than the repository's raw data, which stand here."""

LOOP_SPEEDUP = {
    "few-shot-20": 1.18,
    "few-shot-30": 1.11,
    "few-shot-50": 1.09,
    "star-32": 1.18,
    "star-64": 1.25,
    "star-128": 1.38,
    "star-256": 1.34,
}
"""Radix over flatten by the whole loop (``iter_time``: planning, forward, branching) of the repository's raw data;
speculation with Llama-3-8B, few-shot with Llama-3.1-8B at a prompt of 4,000 tokens. Not in the paper."""

KV_TERABYTES = {
    "flash_decoding": _row(17.62, 26.43, 44.05, 59.96, 39.74, 4.68, 7.01, 128.72, 255.16, OOM, OOM),
    "medusa": _row(1.68, 2.10, 2.94, 12.40, 10.57, 0.58, 1.04, 4.02, 4.15, 4.18, 4.32),
    "radix": _row(17.62, 26.43, 44.05, 59.96, 39.74, 4.68, 7.01, 131.45, 256.79, 522.05, 1044.10),
    "deft:flatten": _row(1.68, 2.10, 2.94, 12.40, 10.57, 0.58, 1.04, 4.10, 4.11, 4.16, 4.35),
}
"""Table 17, left: terabytes of keys and values over a whole run. Its speculation columns belong to a run about 1.4
times as long as the one of table 5."""

PARTIAL_TERABYTES = {
    "flash_decoding": _row(0, 0, 0, 0, 0, 0, 0, 0, 0, OOM, OOM),
    "medusa": _row(1.05, 1.98, 4.61, 3.69, 3.24, 0.18, 0.27, 4.03, 8.33, 16.77, 34.70),
    "radix": _row(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "deft:flatten": _row(0, 0, 0, 0.01, 0.01, 0, 0, 0, 0, 0, 0),
}
"""Table 17, right: terabytes of partial results (scores, masks, softmax). Partial outputs are not counted there."""

SORTING_BY_PROMPT = {1000: (1.39, 1.09), 5000: (1.71, 1.37), 8000: (1.97, 1.53), 10000: (1.84, 1.67)}
"""Table 7: radix over flatten on sorting with the prompt padded to so many tokens; attention and decode."""

TPOT_BY_PROMPT = {
    (32, 1000): {"radix": 6.43, "deft:node": 7.44, "deft:node_chunk": 6.67, "deft:flatten": 6.14},
    (32, 4000): {"radix": 9.17, "deft:node": 10.77, "deft:node_chunk": 6.95, "deft:flatten": 6.45},
    (32, 8000): {"radix": 13.01, "deft:node": 15.22, "deft:node_chunk": 7.78, "deft:flatten": 7.05},
    (32, 20000): {"radix": 24.56, "deft:node": 28.43, "deft:node_chunk": 10.34, "deft:flatten": 9.19},
    (64, 1000): {"radix": 7.37, "deft:node": 7.48, "deft:node_chunk": 6.74, "deft:flatten": 6.27},
    (64, 4000): {"radix": 11.79, "deft:node": 10.73, "deft:node_chunk": 8.12, "deft:flatten": 7.08},
    (64, 8000): {"radix": 18.08, "deft:node": 14.99, "deft:node_chunk": 9.86, "deft:flatten": 8.56},
    (64, 20000): {"radix": 37.51, "deft:node": 28.06, "deft:node_chunk": 14.98, "deft:flatten": 12.74},
}
"""Figure 17: decode latency in seconds of 239 steps of speculation by drafted tokens and prompt, from the
repository's raw data with Llama-3.1-8B; figure 16 is the same over 1,000 tokens."""

ATTENTION_BY_PROMPT = {
    (32, 1000): {"radix": 2.05, "deft:node": 2.79, "deft:node_chunk": 1.95, "deft:flatten": 1.83},
    (32, 4000): {"radix": 4.82, "deft:node": 6.09, "deft:node_chunk": 2.25, "deft:flatten": 2.01},
    (32, 8000): {"radix": 8.68, "deft:node": 10.46, "deft:node_chunk": 3.12, "deft:flatten": 2.73},
    (32, 20000): {"radix": 20.22, "deft:node": 23.62, "deft:node_chunk": 5.65, "deft:flatten": 4.86},
    (64, 1000): {"radix": 2.91, "deft:node": 2.81, "deft:node_chunk": 2.05, "deft:flatten": 1.86},
    (64, 4000): {"radix": 7.43, "deft:node": 6.05, "deft:node_chunk": 3.38, "deft:flatten": 2.73},
    (64, 8000): {"radix": 13.70, "deft:node": 10.34, "deft:node_chunk": 5.09, "deft:flatten": 4.10},
    (64, 20000): {"radix": 33.14, "deft:node": 23.33, "deft:node_chunk": 10.29, "deft:flatten": 8.27},
}
"""Figure 18: attention latency of the same runs."""

FEW_SHOT_BY_PROMPT = {
    1000: {20: (0.84, 0.90), 30: (0.86, 0.89), 50: (0.87, 0.89)},
    4000: {20: (1.74, 1.18), 30: (1.71, 1.11), 50: (1.65, 1.09)},
    20000: {20: (3.33, 1.91), 30: (3.55, 2.02), 50: (3.16, 1.93)},
}
"""Radix over flatten, few-shot with Llama-3.1-8B, by prompt and branches: attention, and the whole loop. From the
repository's raw data, not in the paper."""

MODEL_SPEEDUP = {
    "codellama-7b": {"few-shot-30": 1.34, "sorting": 1.09, "star-64": 1.85},
    "codellama-34b": {"few-shot-30": 1.23, "sorting": 1.03, "star-64": 1.78},
}
"""Table 8: radix over flatten, decode."""

MODEL_ATTENTION_TO_FFN = {
    ("codellama-7b", "radix"): {"few-shot-30": 1.27, "sorting": 1.12, "star-64": 2.12},
    ("codellama-7b", "deft:flatten"): {"few-shot-30": 0.68, "sorting": 0.89, "star-64": 0.69},
    ("codellama-34b", "radix"): {"few-shot-30": 0.80, "sorting": 0.48, "star-64": 1.66},
    ("codellama-34b", "deft:flatten"): {"few-shot-30": 0.45, "sorting": 0.42, "star-64": 0.49},
}
"""Table 8: attention latency over that of the feed-forward layers."""

MODEL_SPEEDUP_BY_PROMPT = {
    "codellama-7b": {1000: 1.09, 5000: 1.37, 8000: 1.53},
    "codellama-34b": {1000: 1.03, 5000: 1.18, 8000: 1.28},
}
"""Table 18: radix over flatten on sorting by prompt, decode."""

MODEL_ATTENTION_SECONDS = {
    "codellama-34b": {
        "radix": {"few-shot-30": 16.85, "sorting": 95.14, "star-64": 164.33},
        "deft:node_chunk": {"few-shot-30": 16.15, "sorting": 103.15, "star-64": 81.74},
        "deft:flatten": {"few-shot-30": 9.62, "sorting": 84.30, "star-64": 48.76},
    },
    "codellama-7b": {
        "radix": {"few-shot-30": 12.39, "sorting": 53.96, "star-64": 96.55},
        "deft:node_chunk": {"few-shot-30": 10.12, "sorting": 54.20, "star-64": 48.96},
        "deft:flatten": {"few-shot-30": 8.24, "sorting": 43.91, "star-64": 36.48},
    },
}
"""Tables 20 (34B, grouped queries) and 21 (7B, a KV head a query head). The cells of node-chunk equal raw files of
node; sorting with 34B counts the store of keys as well."""

MODEL_TABLES = {"codellama-34b": "table 20", "codellama-7b": "table 21"}

UTILISATION = {"deft:node": (961.38, 0.0760, 0.1739, 0.8235), "deft:flatten": (226.82, 0.2119, 0.5191, 0.0)}
"""Table 14: microseconds of one layer, share of the arithmetic rate, share of the memory rate, share of the time at
which the arithmetic was used by less than 5 %; 64 queries below 4,000 tokens, by Nsight."""

ATTENTION_ERROR = {
    "radix": {"MHA": 0.00545, "GQA": 0.00540},
    "deft:node_chunk": {"MHA": 0.00403, "GQA": 0.00403},
    "deft:flatten": {"MHA": 0.00407, "GQA": 0.00404},
}
"""Table 15: relative error of attention against Transformers. Perplexities there agree to 1e-6."""

WIDTH_SPEEDUP = {20: 1.24, 30: 1.28, 50: 1.33}
"""Table 5, radix over flatten, decode, by width at a prompt of 4,000 tokens; figure 14 draws its steps."""

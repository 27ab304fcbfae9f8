"""What the report says around its tables and figures, in Markdown."""

from __future__ import annotations

ABOUT = """
The tables and figures of *DeFT: Decoding with Flash Tree-Attention for Efficient Tree-Structured LLM Inference*
(arXiv:2404.00242v4), measured again with treewise's own kernels and engine on the device named above. Published values
are those of an A100 with 80 GB and float16. Seconds on another device cannot be compared with them; ratios of two
methods in one run can. Workloads are the shapes that the paper's authors recorded: the text does not matter, the
schedule is the work. Table 19 (an RTX 4090) is left out: the device above takes its place.

✓: ours and the published ratio lie on the same side of 1. ≈: one of them is within 3 % of it. ✗: they contradict each
other.
"""

LATENCY = """
One layer's attention is timed at evenly spaced steps of each run, and summed over all steps and layers (midpoint rule).
On a GPU a time is the median of CUDA-graph replays with a cold L2 cache, on a CPU the least of a few. Attention needs
no model. The paper's times are sums of calls with launches and device syncs between them, so that seconds are not
comparable. *Over flatten*, a method's time over that of DeFT-Flatten in the same run, is.

Flash-Decoding has no pages: each sequence holds a copy of its whole path, as in the paper. Where those of all layers do
not fit beside each other, it is out of memory (OOM). Medusa passes all scores through memory, and SpecInfer reads the
whole tree for every query: that is what they are here to show.
"""

RUNS = """
The paper's *decode latency* is the sum of forwards; planning, slots, branching, sampling and the prompt are left out.
The first tables have the same: on a GPU, the time between a step's first kernel and its last. The table behind them has
the whole loop, everything that a caller waits for but the prompt. Its last column says whether runs went to their end.
Where they did not, what a step takes beside attention (the median of the steps that ran) is multiplied with the steps
of the whole run, and attention comes from table 16.

All methods run in one engine, on a GPU with CUDA graphs for all but Medusa and SpecInfer, whose masks no graph holds.
Flash-Decoding reads the contiguous pool, where a node's keys are stored once all the same: as a whole engine it is
Radix, and none of the copies that slowed the paper's unpaged baselines down are made. In a star, the tokens that were
accepted are computed beside the drafted ones.
"""

PROMPTS_ATTENTION = """
The longer the prompt, the more there is to share. Prompts of recorded trees are padded, as in the paper. The
repository's raw data, unlike the paper, also have prompts of 1,000 tokens, where its flatten lost.
"""

PROMPTS_RUNS = """
What a step takes beside attention is measured on the engine (table 5), attention at each prompt length: a run is the
sum of both over its steps.
"""

PROTOCOL = """
- *Decode latency* leaves out what differs between the methods: with 256 drafted tokens the paper's flatten spends 33 ms
  a step on preparing (slots and groups), its Radix 9 ms. By the whole loop of the repository's own raw data, flatten is
  1.34 times as fast there, not 2.23; with prompts of 1,000 tokens it is slower than Radix (0.88 to 0.94).
- Each timer waits for the device, four times a layer, so that no launch can hide behind other work.
- The baseline Radix reads a key once for each query head and never splits a path. The released Flash-Decoding computes
  no attention. The unpaged baselines spend most of their time on copying keys.
- The numbers of node and flatten for 256 drafted tokens are swapped in print: 3.59 times is node's speed.
- *99.58 % less IO* counts each key once. Their flatten kernel reads keys once per 32 queries, so that 3.1 TB are about
  24, and partial results, written in float32, are not counted.
- Speculation is a star of leaves at one position; the recorded topology is never read, and 1,106 of the 1,507 accepted
  lengths are random. Both forms are measured here, each under its own name.
- There is one run of each, without warm-up; ten steps are dropped from latencies, but not from other sums.

Here the whole loop counts, with planning, slots, branching, pruning and drawing; forwards and attention stand beside
it.
"""

REASONS = {
    "radix": """a KV head's queries are packed into one tile, so that a key is read once for all heads of its group;
long paths are split over all multiprocessors; and a prefix that several sequences read comes out of the cache. The
paper's Radix reads a key once a query head, in one program a sequence and head. Radix is much stronger here, and there
is less to gain where little is shared""",
    "medusa": """its unfused products go through memory and caches of other speeds than an A100's""",
    "deft:node": """a node is one item, however long, but takes 64 keys a step, 16 in the paper's kernel, and all heads
of a group share them""",
    "deft:node_chunk": """a node is cut at 256 tokens, not 128, and the heads of a group share its keys; flatten's
blocks have masks to look at where they mix nodes""",
    "flash_decoding": "copies of the prompt cost memory and cache, but heads of a group share keys as in Radix",
}
"""Why a method may stand otherwise beside flatten on a GPU than in the paper."""

ON_CPU = """items are calls of PyTorch's attention, one after the other; large ones are the most efficient, and there
are no idle multiprocessors for which it would pay to cut them"""
"""The same on a CPU."""

SNAPSHOT = """
Counted from the plans of one layer, 32 heads of 128 in 2 bytes, keys and values once a query head, as the paper counts.
DeFT plans are cut as its kernels cut: at most 32 queries in a tile, blocks of 128 tokens.
"""

TRAFFIC = """
Terabytes over a whole run, the mean of the recorded trees, counted from plans. *KV*: each group's keys and values once.
*Raw data*: what the repository's own counters say; the printed speculation columns belong to a run about 1.4 times as
long as the one whose times are printed. *With re-reads*: as the paper's kernels read, once per 32 queries of a group,
which its counter leaves out for flatten. *Partial outputs*: float32 with their log-sum-exp, written and read, which the
paper does not count. *Packed heads*: what a kernel reads that packs a KV head's four query heads, as those here do, in
tiles of 64 rows.
"""

MODELS = """
Attention as in table 16, with the heads of these models. The products of a layer (feed-forward, projections) and of the
head are timed alone for the mean number of rows. *Decode* is attention and products over a whole run: what forwards
cost at least, without norms, rotation or launches. *A/F* is attention over feed-forward. Ratios are those of whole
layers also where a share of each layer was measured.
"""

UTILISATION = """
One layer, {queries} queries below a prompt of {prompt:,} tokens. Rates are shares of those of a large matrix product
and a large copy on the same device in the same run; the bytes are all that the plan moves. The paper asked Nsight. Here
each kind of work item is timed alone, less a launch, and the items are handed to {processors} multiprocessors (on a
CPU: threads) in their order. *Idle processors*: the share of their time without work. *Time of low use*: the
share of the time in which less than 5 % of them have any.
"""

ACCURACY = """
The error is that of random queries, keys and values against the same attention in float64. The paper compares with
Transformers in float16, whose own rounding is in its number; PyTorch's `scaled_dot_product_attention`, which
Transformers calls, stands beside. Below it, one text branches four ways, as a tree here and as four requests in
Transformers, greedily, in float32 and with the same weights.
"""

ITERATIONS = """
The paper: flatten stays even, node follows the spread of node lengths. Here the correlation of node over flatten with
the standard deviation of node lengths is {related:.2f}, and node over flatten is {least:.2g} to {most:.2g}.
"""

BLOCKS = """
The paper: the best size depends on the tree, and flatten beats node-chunk at each size. Here flatten is the faster in
{wins} of {pairs} pairs. By default flatten chooses its sizes from the tree and the machine.
"""

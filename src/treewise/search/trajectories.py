"""Trees of samples with rewards and advantages: what reinforcement learning trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from treewise.awaitables import generate
from treewise.branch import Branch
from treewise.config import MAX_SEQUENCES, SamplingParams, check_integer
from treewise.grammar import Grammar
from treewise.search.evaluators import Reward, mean_logprob, rewarded


@dataclass(frozen=True)
class Segment:
    """A stretch of a trajectory with no branching in it.

    Attributes
    ----------
    node : int
        The same for all trajectories of a tree that share the stretch, and for no others.
    start, end : int
        Its tokens are ``token_ids[start:end]`` of the trajectory.
    value : float
        The reward where the trajectory ends with it, else the mean value of the segments that branch off its end.
    advantage : float
        Its value less the mean over the segments that began with it, in units of their standard deviation.
    """

    node: int
    start: int
    end: int
    value: float
    advantage: float


@dataclass(frozen=True)
class Trajectory:
    """One path of a tree of samples, in plain numbers and text that JSON can hold.

    Attributes
    ----------
    index : int
        Its place among the trajectories of its prompt, which stand depth first.
    parent : int or None
        The trajectory it branched off, which is the one before it; None where it shares nothing but the prompt.
    shared : int
        How many of its first tokens it shares with its parent, so that ``token_ids[shared:]`` of all trajectories are
        every token of the tree once.
    prompt_token_ids, token_ids : list of int
        What was given, and what was decoded.
    logprobs : list of float
        Natural log-probability of each decoded token under the model itself, before temperature and `top_p`.
    text : str
        The text that the reward was given for.
    finish_reason : str or None
        ``"stop"`` or ``"length"``.
    reward : float
    advantage : float
        The reward less the mean over all trajectories of the prompt, in units of their standard deviation.
    segments : list of Segment
        The path from the prompt on.
    """

    index: int
    parent: int | None
    shared: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None
    reward: float
    advantage: float
    segments: list[Segment]


async def rollouts(
    root: Branch,
    widths: Sequence[int] = (4, 2),
    at: Sequence[int] = (32,),
    reward: Reward | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    grammar: Grammar | None = None,
) -> list[Trajectory]:
    """Draw a tree of samples for reinforcement learning: trajectories with rewards and group-relative advantages.

    ``widths[0]`` samples begin at the prompt; each that is still going after ``at[0]`` tokens branches in
    ``widths[1]``, and so on. All common beginnings are computed once. With one width it is the group of GRPO (Shao et
    al., "DeepSeekMath", 2024). Segments carry advantages among their siblings too, after Yang et al., "TreeRPO: Tree
    Relative Policy Optimization", 2025. Standard deviations are those of the population; where it is 0, as with one
    sibling alone, advantages are 0.

    Parameters
    ----------
    root : Branch
    widths : sequence of int
        How many samples go on from each place of branching, the prompt first.
    at : sequence of int
        After how many tokens the later branchings come, ascending and below `max_tokens`; one fewer than `widths`.
    reward : callable, optional
        Rates the list of all texts, in a worker thread; the mean log-probability a token by default.
    temperature, top_p, stop
        As in `SamplingParams`. A stop string that reaches over a branching is not seen.
    max_tokens : int
        The most tokens of a trajectory.
    grammar : Grammar, optional
        What a trajectory must be; samples go on in it where they branch.

    Returns
    -------
    list of Trajectory
        Depth first. Nothing of the tree is pruned; its branches' scores are the values.

    Raises
    ------
    ValueError
        If a parameter is out of range, or the reward does not give one finite number a text.
    """
    stages = _stages(widths, at, max_tokens)
    samples, groups = [root], []
    for begin, end, width in stages:
        params = SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=end - begin, stop=stop, grammar=grammar
        )
        going = {one: one.fork(width) for one in samples if one is root or _cut_at(one, root, begin)}
        forks = list(going.values())
        samples = [one for one in samples if one not in going]
        samples += await generate([fork for siblings in forks for fork in siblings], params)
        groups += forks
    samples.sort(key=lambda sample: sample.path)

    if reward is None:
        values = [mean_logprob(sample, root) for sample in samples]
    else:
        values = await rewarded("reward", reward, samples)
    for sample, value in zip(samples, values, strict=True):
        sample.score = value
    shares: dict[Branch, float] = {}
    for siblings in reversed(groups):  # the last branchings first
        for one in siblings:
            one.score = fmean(child.score or 0.0 for child in one.children) if one.children else one.score
        shares |= zip(siblings, advantages([one.score or 0.0 for one in siblings]), strict=True)
    nodes = {one: node for node, one in enumerate(one for siblings in groups for one in siblings)}

    trajectories: list[Trajectory] = []
    before: set[Branch] = set()
    for index, (sample, share) in enumerate(zip(samples, advantages(values), strict=True)):
        line = sample.lineage()[len(root.path) + 1 :]
        shared = sum(len(one.tokens) for one in line if one in before)
        segments = [
            Segment(
                nodes[one], one.start - root.num_tokens, one.num_tokens - root.num_tokens, one.score or 0.0, shares[one]
            )
            for one in line
        ]
        trajectories.append(
            Trajectory(
                index=index,
                parent=index - 1 if shared else None,
                shared=shared,
                prompt_token_ids=root.path_tokens,
                token_ids=[token for one in line for token in one.tokens],
                logprobs=[logprob for one in line for logprob in one.logprobs if logprob is not None],
                text=sample.text,
                finish_reason=sample.finish_reason,
                reward=values[index],
                advantage=share,
                segments=segments,
            )
        )
        before = set(line)
    return trajectories


def advantages(values: Sequence[float]) -> list[float]:
    """Return how far each value is above the group's mean, in standard deviations of the group; 0 where all are equal.

    Examples
    --------
    >>> advantages([1.0, 0.0, 0.0, 1.0]), advantages([0.5])
    ([1.0, -1.0, -1.0, 1.0], [0.0])
    """
    mean, deviation = fmean(values), pstdev(values)
    return [(value - mean) / deviation if deviation > 0 else 0.0 for value in values]


def _stages(widths: Sequence[int], at: Sequence[int], max_tokens: int) -> list[tuple[int, int, int]]:
    """Return where each stretch of the tree begins and ends, in tokens, and how many samples begin there."""
    check_integer("max_tokens", max_tokens, 1)
    for name, values in (("widths", widths), ("at", at)):
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise ValueError(f"{name} must be a list of integers, not {values!r}")
    if not widths or len(at) != len(widths) - 1:
        raise ValueError(f"at must have one place fewer than widths ({len(widths)}), not {len(at)}")
    for width in widths:
        check_integer("widths", width, 1, MAX_SEQUENCES)
    for place, least in zip(at, (0, *at), strict=False):
        check_integer("at", place, least + 1, max_tokens - 1)
    return list(zip((0, *at), (*at, max_tokens), widths, strict=True))


def _cut_at(sample: Branch, root: Branch, begin: int) -> bool:
    """Whether a sample was cut off to branch, rather than ended."""
    return sample.finish_reason == "length" and sample.num_tokens - root.num_tokens == begin

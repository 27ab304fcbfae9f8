"""The ready-made programs on a tiny random model: what they choose, what they leave behind, and what they refuse."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import EOS, ChatBytes, dense_logits, idle, tiny_llm, tiny_model

from treewise.awaitables import gather, generate, score
from treewise.branch import DeadBranchError
from treewise.budgets import BudgetExceeded, Cancelled, limit
from treewise.config import BeamSearchParams, SamplingParams
from treewise.llm import RequestsFailed
from treewise.search import (
    STRATEGIES,
    ask,
    beam_search,
    best_of_n,
    depth_first_thoughts,
    monte_carlo_tree_search,
    replay,
    rollouts,
    self_certainty,
    self_consistency,
    step_beam_search,
    tree_of_thoughts,
)


def parity(text):
    return str(len(text.strip("aeiou ")) % 2)


MODEL = tiny_model()
SHORT = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 6}
THOUGHTS = {"depth": 2, "stop": " ", "thought_tokens": 5, "answer_tokens": 4, "temperature": 1.0, "top_p": 1.0}
SETTINGS = {
    "best_of_n": {"n": 4, **SHORT},
    "self_consistency": {"n": 5, "extract": parity, **SHORT},
    "beam": {"beam_width": 3, "max_tokens": 5},
    "tot": THOUGHTS,
    "tot_dfs": {"threshold": 0.3, **THOUGHTS},
    "mcts": {"iterations": 6, "width": 2, **THOUGHTS},
    "step_beam": {"width": 6, "beam": 3, **THOUGHTS},
    "rollouts": {"widths": (3, 2), "at": (3,), "max_tokens": 6},
    "replay": {},
}
BRANCHING = [name for name in STRATEGIES if name != "rollouts"]  # those that return branches


def run(name, prompt="two plus two", seed=3, llm=None, **settings):
    llm = llm or tiny_llm(MODEL, enable_prefix_caching=False)
    [result] = llm.run(STRATEGIES[name].build(**SETTINGS[name] | settings), [prompt], seed=seed)
    llm.engine.check_integrity()
    assert not llm.engine.kv.forest.roots, "something was left in the pool"
    return result


def alone(branch):
    """Log-probs of a branch's path, computed as one sequence without cache or tree; None for given tokens."""
    tokens = branch.path_tokens
    logprobs = torch.log_softmax(dense_logits(MODEL, tokens), dim=-1)
    return [None, *(float(logprobs[i, token]) for i, token in enumerate(tokens[1:]))]


def tokens_of(result):
    """Return the whole tree without its log-probs, which differ by rounding from batch to batch."""
    return [(node.parent, node.token_ids, node.state) for node in result.tree.nodes]


def branches_of(result):
    value = result.value
    return list((value[0] if isinstance(value, list) else value).tree.branches())


@pytest.mark.parametrize("name", BRANCHING)
def test_every_branch_of_a_tree_is_the_same_path_alone(name):
    for branch in branches_of(run(name)):
        expected = alone(branch)
        decoded = [place for place, logprob in enumerate(branch.logprobs) if logprob is not None]
        own = [branch.logprobs[place] for place in decoded]
        assert own == pytest.approx([expected[branch.start + place] for place in decoded], abs=1e-4)


@pytest.mark.parametrize("name", BRANCHING)
def test_a_seed_gives_one_tree(name):
    first, second, other = run(name), run(name), run(name, seed=4)
    assert first.tree.nodes == second.tree.nodes
    if name not in ("beam", "replay"):
        assert first.tree.nodes != other.tree.nodes


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_tree_does_not_depend_on_the_others_in_the_batch(name):
    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    program = STRATEGIES[name].build(**SETTINGS[name])
    results = llm.run(program, ["two plus two", "seven", "two plus three"], seed=3)
    [first] = llm.run(program, ["two plus two"], seed=3)
    assert tokens_of(results[0]) == tokens_of(first)


def test_every_branch_draws_what_it_draws_alone():
    async def one_of_four(root, place):
        answers = root.fork(4)
        for answer in answers:
            if answer is not answers[place]:
                answer.prune()
        await generate([answers[place]], SamplingParams(**SHORT))
        return answers[place]

    together = branches_of(run("best_of_n"))[1:]
    for place, branch in enumerate(together):
        [alone] = tiny_llm(MODEL).run(one_of_four, ["two plus two"], seed=3, place=place)
        assert alone.best.token_ids == branch.token_ids


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_whose_budget_is_used_up_lets_go_of_everything(name):
    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    program = STRATEGIES[name].build(**SETTINGS[name])
    prompts = ["two plus two", "seven"]
    whole = llm.run(program, prompts, seed=3)
    for tokens in (1, 3, whole[0].tree.usage.completion_tokens // 2):
        results = llm.run(program, prompts, seed=3, token_budget=tokens, on_error="return")
        assert isinstance(results[0].error, BudgetExceeded)
        assert results[0].tree.usage.completion_tokens >= tokens
        idle(llm)
    again = llm.run(program, prompts, seed=3)
    assert [tokens_of(result) for result in again] == [tokens_of(result) for result in whole]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_search_that_is_cancelled_leaves_its_root_as_it_was(name):
    async def program(root):
        [branch] = root.fork()
        part = limit(STRATEGIES[name].program(branch, **SETTINGS[name]))

        async def cancel():
            await generate(root.fork(), SamplingParams(max_tokens=2))
            part.cancel("enough")

        async def search():
            with pytest.raises(Cancelled, match="enough"):
                await part

        await gather(search(), cancel())
        assert branch.alive and not branch.tokens
        branch.prune()
        return await generate(root.fork(), SamplingParams(**SHORT))

    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    [result] = llm.run(program, ["two plus two"], seed=3)
    assert len(result.value[0].token_ids) == 6
    idle(llm)


@pytest.mark.parametrize("name", ["best_of_n", "self_consistency", "tot", "tot_dfs", "mcts", "step_beam", "rollouts"])
def test_a_reward_that_fails_harms_no_other_search(name):
    def fails_on_seven(texts):
        if broken and texts[0].startswith(broken[0]):
            raise KeyError("no idea")
        return [float(len(text)) for text in texts]

    option = {"best_of_n": "by", "self_consistency": "by", "rollouts": "reward"}.get(name, "evaluate")
    settings = SETTINGS[name] | {option: fails_on_seven}
    prompts = ["two plus two", "seven", "two plus three"]
    broken = []
    llm = tiny_llm(MODEL, enable_prefix_caching=False)
    good = llm.run(STRATEGIES[name].build(**settings), prompts, seed=3)
    seven = good[1].tree.nodes[1].text
    assert not any(result.tree.nodes[1].text.startswith(seven) for result in (good[0], good[2]))
    broken.append(seven)
    with pytest.raises(RequestsFailed, match="no idea") as failed:
        llm.run(STRATEGIES[name].build(**settings), prompts, seed=3)
    error = failed.value.errors[1]
    assert list(failed.value.errors) == [1] and isinstance(error, KeyError)
    assert any("while calling fails_on_seven" in note for note in error.__notes__)
    assert any(f"in {name}, while" in note for note in error.__notes__)
    for place in (0, 2):
        assert tokens_of(failed.value.outputs[place]) == tokens_of(good[place])
    idle(llm)


@pytest.mark.parametrize("name", BRANCHING)
def test_no_inner_branch_stays_behind_as_an_answer(name):
    result = run(name, **{"depth": 3} if "depth" in SETTINGS[name] else {})
    kept = result.value if isinstance(result.value, list) else [result.value]
    assert sorted(output.token_ids for output in result.outputs) == sorted(branch.token_ids for branch in kept)
    assert all(branch.score is not None for branch in kept)


@pytest.mark.parametrize(
    ("by", "value"),
    [
        ("mean_logprob", lambda branch: branch.logprob / len(branch.token_ids)),
        ("logprob", lambda branch: branch.logprob),
        ("self_certainty", lambda branch: certainty_alone(branch)),
        (lambda texts: [text.count("e") - len(text) for text in texts], lambda b: b.text.count("e") - len(b.text)),
    ],
)
def test_best_of_n_keeps_the_best(by, value):
    result = run("best_of_n", by=by)
    answers = branches_of(result)[1:]
    assert len(answers) == 4
    assert result.value is max(answers, key=value)
    assert [answer.score for answer in answers] == pytest.approx([value(answer) for answer in answers], rel=1e-4)
    assert [answer.pruned for answer in answers] == [answer is not result.value for answer in answers]


@pytest.mark.parametrize("question", [None, "Is it short?"])
@pytest.mark.parametrize("by", ["judge", "vote"])
def test_the_model_itself_may_choose(by, question):
    result = run("best_of_n", n=3, by=by, question=question)
    answers = branches_of(result)[1:]
    if by == "judge":
        asked = question or "Is this answer correct? Answer Yes or No."
        chances = []
        for answer in answers:
            before = [*answer.path_tokens, *f"\n\n{asked}\nAnswer:".encode()]
            yes, no = (logprob_of_end([*before, *word.encode()], len(word)) for word in (" Yes", " No"))
            chances.append(1 / (1 + math.exp(no - yes)))
    else:
        asked = question or "Which of these answers is the best? Answer with its number."
        options = "".join(f"\n{number}. {answer.text.strip()}" for number, answer in enumerate(answers, 1))
        before = f"two plus two\n\n{asked}{options}\nAnswer:".encode()
        chances = [math.exp(logprob_of_end([*before, *f" {number}.".encode()], 3)) for number in (1, 2, 3)]
    assert [answer.score for answer in answers] == pytest.approx(chances, rel=1e-3)
    assert result.value is max(answers, key=lambda answer: answer.score)


def certainty_alone(branch):
    """Kang et al.'s formula: the negative mean over tokens and vocabulary of ``log(V p)``."""
    logprobs = torch.log_softmax(dense_logits(MODEL, branch.path_tokens), dim=-1)
    before = logprobs[-1 - len(branch.token_ids) : -1]
    return -float((before + math.log(before.shape[1])).mean())


def test_self_certainty_draws_the_same_answers():
    texts = [{branch.text for branch in branches_of(run("best_of_n", by=by))} for by in ("logprob", "self_certainty")]
    assert texts[0] == texts[1]
    assert self_certainty(torch.zeros(2, 8).log_softmax(-1)).tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("name", ["best_of_n", "self_consistency"])
def test_a_reward_must_rate_every_text(name):
    with pytest.raises(ValueError, match="by: the reward gave 1 values for 4 texts"):
        run(name, n=4, by=lambda texts: [0.0])
    with pytest.raises(ValueError, match=r"by: the value of .* must be a finite number, not nan"):
        run(name, n=4, by=lambda texts: [0.0, 1.0, math.nan, 2.0])


def test_self_consistency_counts_votes():
    result = run("self_consistency")
    solutions = branches_of(result)[1:]
    votes = [solution.note for solution in solutions]
    winner = result.value[0].note
    assert votes.count(winner) * 2 > len(votes)
    assert {s for s in solutions if s.note == winner} == set(result.value)
    assert all(s.score == votes.count(s.note) / 5 and s.pruned == (s.note != winner) for s in solutions)
    means = [s.logprob / len(s.token_ids) for s in result.value]
    assert means == sorted(means, reverse=True)


def test_self_consistency_breaks_ties_by_the_likeliest_solution():
    result = run("self_consistency", extract=lambda text: text)
    solutions = branches_of(result)[1:]
    assert len({solution.text for solution in solutions}) == 5
    assert result.value == [max(solutions, key=lambda s: s.logprob / len(s.token_ids))]


def test_self_consistency_without_any_answer_keeps_the_likeliest():
    result = run("self_consistency", extract=lambda text: None)
    [best] = result.value
    assert best.score == 0 and best.note is None


@pytest.mark.parametrize("by", ["mean_logprob", "logprob", "self_certainty", lambda texts: list(map(len, texts))])
@pytest.mark.parametrize("borda", [0.0, 0.5, 1.0, 3])
def test_votes_are_weighted_by_rank(by, borda):
    result = run("self_consistency", n=6, by=by, borda=borda, extract=parity)
    ranked = branches_of(run("best_of_n", n=6, by=by))[1:]
    ranked.sort(key=lambda branch: -branch.score)
    votes = {answer: 0.0 for answer in map(parity, (branch.text for branch in ranked))}
    for rank, branch in enumerate(ranked, 1):
        votes[parity(branch.text)] += (6 - rank + 1) ** borda
    winner = max(votes, key=votes.__getitem__)
    solutions = {branch.text: branch for branch in branches_of(result)[1:]}
    assert [b.text for b in result.value] == [b.text for b in ranked if parity(b.text) == winner]
    for text, branch in solutions.items():
        assert branch.score == pytest.approx(votes[parity(text)] / sum(votes.values()))
        assert branch.pruned == (parity(text) != winner)


def test_the_power_of_votes_leads_from_the_majority_to_the_best():
    # One solution is rated best and stands alone with its answer; the five others agree.
    def alone_first(texts):
        first.append(max(texts))
        return [float(text == max(texts)) for text in texts]

    first = []
    settings = {"n": 6, "by": alone_first, "extract": lambda text: str(text == first[-1])}
    winners = [run("self_consistency", borda=borda, **settings).value for borda in (0, 1, 50)]
    assert [len(solutions) for solutions in winners] == [5, 5, 1]
    # Powers of ranks: 6 ** p against 5 ** p + 4 ** p + 3 ** p + 2 ** p + 1.
    assert [solutions[0].score for solutions in winners] == pytest.approx([5 / 6, 15 / 21, 1.0], abs=1e-3)


def test_beam_search_is_the_engines_own():
    result = run("beam")
    [other] = tiny_llm(MODEL).beam_search(["two plus two"], BeamSearchParams(3, max_tokens=5))
    assert [branch.token_ids for branch in result.value] == [output.token_ids for output in other.outputs]
    assert [b.score for b in result.value] == pytest.approx([b.logprob / len(b.token_ids) for b in result.value])


@pytest.mark.parametrize("evaluate", ["judge", "vote", "logprob", lambda texts: [text.count("e") for text in texts]])
def test_tree_of_thoughts_keeps_the_best_chains(evaluate):
    result = run("tot", evaluate=evaluate, depth=2, beam=2, conclude="=")
    tree = branches_of(result)
    levels = [[branch for branch in tree if len(branch.path) == depth] for depth in (1, 2, 3)]
    assert [len(level) for level in levels] == [3, 6, 2]
    for level, beam in zip(levels, (2, 2, 1), strict=True):
        ranked = sorted(level, key=lambda branch: -branch.score)
        # A kept chain may be given up later, with the last of those that went on from it.
        assert not any(branch.children or branch.alive for branch in ranked[beam:])
        assert all(branch.all_children for branch in ranked[:beam] if branch not in levels[2])
    assert result.value is max(levels[2], key=lambda branch: branch.score)
    assert all(branch.text.partition("=")[1] for branch in levels[2])
    for branch in levels[0] + levels[1]:
        assert branch.finish_reason == "length" or branch.stop_reason == " " or branch.tokens[-1] == EOS


def test_a_chain_that_ended_stays_in_the_race():
    async def program(root):
        # Only the end of the text can follow: every chain is over after its first token.
        return await tree_of_thoughts(root, depth=3, width=2, beam=2, temperature=0, evaluate="logprob")

    model = tiny_model()
    bias = dense_logits(model, [5])[-1]
    original = model.logits
    model.logits = lambda *args: original(*args).index_fill(1, torch.tensor([EOS]), float(bias.max()) + 100)
    [result] = tiny_llm(model).run(program, ["x"])
    assert result.value.token_ids == [EOS]
    assert len(branches_of(result)) == 3, "no branch goes on from an ended one"


def test_replay_repeats_a_recording():
    spans = [[-7, 0, [1, 2]], [1, 2, [3, 4]], [1, 3, []], [3, 3, []], [3, 6, []]]
    for prompt in ("x", "a much longer prompt than the recorded one"):
        result = run("replay", prompt=prompt, recording=spans)
        shape = [(len(node.token_ids), node.state == "pruned") for node in result.tree.nodes]
        assert shape == [(len(prompt), False), (2, False), (1, True), (4, False), (3, True)]
        first, second = result.tree.nodes[1], result.tree.nodes[4]
        ranks = dense_logits(MODEL, list(prompt.encode()))[-1].topk(2).indices.tolist()
        assert [first.token_ids[0], second.token_ids[0]] == ranks


def test_replay_reads_a_file_of_recordings(tmp_path):
    path = tmp_path / "recordings.json"
    trees = [[[0, 0, [1]], [1, 9, []]], [[0, 0, [1, 2]], [1, 3, []], [1, 3, []]]]
    drafted = {"topologies": {}, "accepted_lengths": [1], "prompt_tokens": 3}
    path.write_text(json.dumps({"reasoning": {"sorting": trees}, "speculative": drafted}))
    result = run("replay", recording=str(path), task="sorting", number=1)
    assert [len(branch.token_ids) for branch in result.value] == [3, 3]
    assert [len(branch.token_ids) for branch in run("replay", recording=path, max_tokens=4).value] == [4]
    for settings, message in (
        ({"task": "set"}, "task: 'set' is not one of sorting"),
        ({"number": 2}, "number must be"),
    ):
        with pytest.raises(ValueError, match=message):
            run("replay", recording=path, **settings)


def test_a_question_to_plain_text_is_a_paragraph():
    async def program(root):
        [branch] = await generate(root.fork(1), SamplingParams(temperature=0, max_tokens=3))
        return branch, await ask([root, branch], "Good?", ["yes", "no"])

    [result] = tiny_llm(MODEL).run(program, ["text"])
    branch, rated = result.value
    for path, values in zip((branch.parent, branch), rated, strict=True):
        for choice, value in zip((" yes", " no"), values, strict=True):
            tokens = [*path.path_tokens, *b"\n\nGood?\nAnswer:", *choice.encode()]
            assert value == pytest.approx(logprob_of_end(tokens, len(choice)), abs=1e-3)
    assert len(result.tree.nodes) == 2, "questions leave nothing behind"


@pytest.mark.parametrize("ended", [False, True])
def test_a_question_in_a_chat_is_the_next_turn(ended):
    codec = ChatBytes()
    prompt = codec.apply_chat_template([{"role": "user", "content": "hi"}])

    async def program(root):
        branch = root.fork()[0].append("yo").append([EOS] * ended)
        return await ask([branch], "Good?", ["yes"])

    llm = tiny_llm(MODEL)
    llm.engine.codec = codec
    [result] = llm.run(program, [prompt])
    tokens = [*prompt, *b"yo", EOS, *b"[user]Good?", EOS, *b"[assistant]", *b"yes"]
    assert result.value[0][0] == pytest.approx(logprob_of_end(tokens, 3), abs=1e-3)


def test_a_question_goes_on_from_the_turns_of_the_branch():
    async def program(root):
        asked, told, begun = root.fork(3)
        asked.append("yo").message("user", "And?")
        told.message("system", "Be brief.")
        begun.append("yo")
        rated = await ask([asked, told, begun], "Good?", ["yes", "no"])
        for branch, values in ((asked, rated[0]), (begun, rated[2])):
            [expected] = await score(branch.fork()[0].message("user", "Good?"), "", ["yes", "no"])
            assert values == pytest.approx(expected, abs=1e-3)
        # No turn of the model's has begun there.
        [expected] = await score(told, "\n\nGood?\nAnswer:", [" yes", " no"])
        assert rated[1] == pytest.approx(expected, abs=1e-3)

    llm = tiny_llm(MODEL)
    llm.engine.codec = codec = ChatBytes()
    llm.run(program, [codec.apply_chat_template([{"role": "user", "content": "hi"}])])


def logprob_of_end(tokens, count):
    logprobs = torch.log_softmax(dense_logits(MODEL, tokens), dim=-1)
    return sum(float(logprobs[place - 1, tokens[place]]) for place in range(len(tokens) - count, len(tokens)))


@pytest.mark.parametrize(
    ("program", "settings", "message"),
    [
        (best_of_n, {"n": 0}, "n must be an integer"),
        (
            best_of_n,
            {"by": "length"},
            "by: 'length' is neither one of mean_logprob, logprob, judge, vote, self_certainty nor a",
        ),
        (best_of_n, {"temperature": -1}, "temperature must be"),
        (self_consistency, {"extract": "digits"}, "extract: 'digits' is neither one of answer, boxed"),
        (self_consistency, {"n": "many"}, "n must be an integer"),
        (self_consistency, {"by": "rank"}, "by: 'rank' is neither one of mean_logprob, logprob, judge, vote,"),
        (self_consistency, {"by": "judge", "question": 3}, "question must be a text or None, not 3"),
        (self_consistency, {"borda": -0.5}, r"borda must be a number in \[0, 50\], not -0.5"),
        (beam_search, {"beam_width": 0}, "beam_width must be"),
        (beam_search, {"beam_width": 4, "num_beam_groups": 3}, r"num_beam_groups must divide beam_width \(4\), not 3"),
        (beam_search, {"diversity_penalty": 0.5}, "diversity_penalty must be 0 with one beam group, not 0.5"),
        (beam_search, {"diversity_penalty": -1}, "diversity_penalty must be a number"),
        (
            beam_search,
            {"num_return_sequences": 5},
            r"num_return_sequences must be an integer in \[1, 4\] or None",
        ),
        (rollouts, {"widths": (2, 0)}, "widths must be"),
        (rollouts, {"widths": 4}, "widths must be a list of integers, not 4"),
        (rollouts, {"at": ()}, r"at must have one place fewer than widths \(2\), not 0"),
        (rollouts, {"widths": (2, 2, 2), "at": (8, 8)}, "at must be an integer in"),
        (rollouts, {"at": (300,)}, r"at must be an integer in \[1, 255\]"),
        (rollouts, {"max_tokens": 0}, "max_tokens must be"),
        (tree_of_thoughts, {"depth": 0}, "depth must be"),
        (tree_of_thoughts, {"width": 1.5}, "width must be"),
        (tree_of_thoughts, {"beam": -1}, "beam must be"),
        (tree_of_thoughts, {"thought_tokens": 0}, "thought_tokens must be"),
        (tree_of_thoughts, {"evaluate": "guess"}, "evaluate: 'guess' is neither one of judge, vote, logprob nor"),
        (
            tree_of_thoughts,
            {"breadth": 2},
            "breadth: programs over thoughts have no such keyword; they share evaluate,",
        ),
        (tree_of_thoughts, {"question": 3}, "question must be a text or None, not 3"),
        (tree_of_thoughts, {"conclude": None}, "conclude must be a text, not None of type NoneType"),
        (tree_of_thoughts, {"stop": [""]}, "stop must be"),
        (depth_first_thoughts, {"depth": 0}, "depth must be"),
        (depth_first_thoughts, {"budget": 0}, "budget must be"),
        (depth_first_thoughts, {"solutions": 0.5}, "solutions must be"),
        (depth_first_thoughts, {"threshold": math.nan}, "threshold must be"),
        (depth_first_thoughts, {"temperature": -1}, "temperature must be"),
        (monte_carlo_tree_search, {"iterations": 0}, "iterations must be"),
        (monte_carlo_tree_search, {"parallel": 0}, "parallel must be"),
        (monte_carlo_tree_search, {"width": "two"}, "width must be"),
        (monte_carlo_tree_search, {"c": -1}, "c must be"),
        (monte_carlo_tree_search, {"evaluate": "vote"}, "evaluate: 'vote' compares thoughts of one ballot only"),
        (
            monte_carlo_tree_search,
            {"evaluate": "guess"},
            "evaluate: 'guess' is neither one of judge, vote, logprob nor",
        ),
        (step_beam_search, {"width": 0}, "width must be"),
        (step_beam_search, {"width": 4, "beam": 5}, r"beam must be an integer in \[1, 4\]"),
        (step_beam_search, {"balance": 0}, "balance must be"),
        (step_beam_search, {"allot": "all"}, "allot: 'all' is not one of rebase, dvts, top"),
        (step_beam_search, {"answer_tokens": 0}, "answer_tokens must be"),
        (replay, {"recording": []}, "a recording needs a first node"),
        (replay, {"recording": [[0, 0]]}, r"node 0 must be \[start, end, children\]"),
        (replay, {"recording": "no-such-file"}, "cannot read recordings from no-such-file"),
        (replay, {"max_tokens": -1}, "max_tokens must be"),
    ],
)
def test_mistakes_are_named(program, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(MODEL).run(program, ["x"], **settings)


def test_a_strategy_says_what_it_has():
    for name, strategy in STRATEGIES.items():
        assert strategy.name == name
        assert strategy.description.endswith((".", "text."))
        assert strategy.defaults
        assert strategy.build().__name__ == name
    assert STRATEGIES["best_of_n"].defaults["n"] == 8
    assert list(STRATEGIES["tot"].defaults)[:5] == ["depth", "width", "beam", "evaluate", "question"]
    with pytest.raises(ValueError, match="breadth: strategy tot has no such setting; it has depth, width"):
        STRATEGIES["tot"].build(breadth=3)


def test_an_answer_outlives_its_request_as_text_only():
    best = run("best_of_n").value
    assert best.text and math.isfinite(best.score)
    with pytest.raises(DeadBranchError):
        best.fork()

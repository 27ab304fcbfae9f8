"""Conversations that grow on branches are, token for token, what the chat template makes of them."""

import pytest
from tiny import EOS, ChatBytes, idle, tiny_llm, tiny_model

from treewise import SamplingParams, generate

MODEL = tiny_model()
SYSTEM = {"role": "system", "content": "Be kind."}
HELLO = {"role": "user", "content": "Hello"}
YES = {"role": "assistant", "content": "Yes?"}
BYE = {"role": "user", "content": "Bye"}


class Trimming(ChatBytes):
    """Cuts what the model said at its first full stop, once the next turn follows, and marks the end by ``~~``."""

    def render_chat(self, messages, add_generation_prompt=True):
        last = len(messages) - 1
        text = ""
        for i, turn in enumerate(messages):
            said = turn["content"].partition(".")[0] if i < last else turn["content"]
            text += f"<{turn['role']}>{said}~~"
        return text + "<assistant>" * add_generation_prompt


class Absentminded(ChatBytes):
    """Shows the last turn only."""

    def render_chat(self, messages, add_generation_prompt=True):
        return super().render_chat(messages[-1:], add_generation_prompt)


def path_of(program, prompt=(7, 8), codec=None):
    """Return the path of the branch that `program` returns."""
    llm = tiny_llm(MODEL, ChatBytes() if codec is None else codec)
    [result] = llm.run(program, [prompt])
    idle(llm)
    return result.value.path_tokens


def template(*messages, reply=True, codec=None):
    return (codec or ChatBytes()).apply_chat_template(messages, reply)


def say(branch, message, **options):
    return branch.message(message["role"], message["content"], **options)


def test_the_first_turn_follows_a_plain_prompt_and_later_ones_follow_it():
    async def program(root):
        [branch] = root.fork()
        for message in (SYSTEM, HELLO, YES, BYE):
            assert say(branch, message) is branch
        return branch

    assert path_of(program) == [7, 8, *template(SYSTEM, HELLO, YES, BYE)]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_what_the_model_said_is_its_turn(known, ended):
    async def program(root):
        [branch] = root.fork()
        branch.append("Yes?").append([EOS] * ended)
        say(branch, BYE)
        [again] = branch.fork()
        return say(again.append("See you~" if not ended else "See you"), HELLO)

    answers = YES, {"role": "assistant", "content": "See you~" if not ended else "See you"}
    prompt = [SYSTEM, HELLO] if known else template(SYSTEM, HELLO)
    path = path_of(program, prompt)
    if ended:  # a "~" that was appended as text is no end of a turn
        assert path == template(SYSTEM, HELLO, answers[0], BYE, answers[1], HELLO)
    else:
        assert path == [*template(SYSTEM, HELLO, YES, BYE), *b"See you~", EOS, *b"[user]Hello", EOS, *b"[assistant]"]


def test_turns_of_branches_that_decode_and_are_forked_in_the_middle():
    async def program(root):
        say(root, HELLO)
        [early] = root.fork()
        [answer] = await generate(root.fork(), SamplingParams(max_tokens=5, seed=1, temperature=2.0, min_tokens=5))
        say(answer, BYE)
        [cut] = answer.fork(at=root.num_tokens + 2)
        paths = [early.path_tokens, answer.path_tokens]
        return [*paths, say(early, BYE).path_tokens, say(cut, BYE).path_tokens, answer.tokens]

    llm = tiny_llm(MODEL, ChatBytes())
    [result] = llm.run(program, [template(SYSTEM, reply=False)])
    begun, went_on, silent, cut, own = result.value
    assert begun == template(SYSTEM, HELLO)
    bye = [EOS, *b"[user]Bye", EOS, *b"[assistant]"]
    assert went_on == begun + own and own[5:] == bye[own[4] == EOS :]
    assert silent == [*begun, *bye]
    assert cut == [*begun, *own[:2], *bye]
    idle(llm)


def test_replies_can_be_asked_for_or_left_out():
    async def program(root):
        return say(say(root.fork()[0], SYSTEM, reply=True).append("Hm").fork()[0], HELLO, reply=False)

    hm = {"role": "assistant", "content": "Hm"}
    assert path_of(program) == [7, 8, *template(SYSTEM, hm, HELLO, reply=False)]


def test_a_turn_that_the_template_edits_stays_as_the_model_wrote_it():
    codec = Trimming()

    async def program(root):
        [branch] = root.fork()
        return say(say(branch.append("Yes. Why?").append([EOS]), BYE).append("So."), HELLO)

    said = [*b"Yes. Why?", EOS, EOS, *b"<user>Bye", EOS, EOS, *b"<assistant>So."]
    assert path_of(program, [HELLO], codec) == [
        *template(HELLO, codec=codec), *said, EOS, EOS, *b"<user>Hello", EOS, EOS, *b"<assistant>",
    ]  # fmt: skip


def test_turns_that_cannot_follow_are_refused():
    async def behind_a_turn(root):
        say(root, SYSTEM).append("and")
        say(root, HELLO)

    async def forgotten(root):
        say(say(root, HELLO).append("Yes"), BYE)

    async def rewritten(root):
        say(say(root, SYSTEM), HELLO)

    for program, codec, message in (
        (behind_a_turn, ChatBytes(), "3 tokens that belong to no turn"),
        (forgotten, Absentminded(), "leaves out what the model said"),
        (rewritten, Absentminded(), "writes the earlier turns in another way"),
    ):
        with pytest.raises(ValueError, match=message):
            path_of(program, codec=codec)
    llm = tiny_llm(MODEL)
    with pytest.raises(ValueError, match="no chat template; put plain text on the branch with append"):
        llm.run(rewritten, ["x"])
    idle(llm)

"""Trees drawn while they grow, on a console that is recorded."""

import io

import pytest
from rich.console import Console
from tiny import idle, tiny_llm, tiny_model

import treewise.llm
from treewise import LiveTree, SamplingParams, generate
from treewise.cli import main
from treewise.outputs import draw
from treewise.results import Tree

MODEL = tiny_model()
PARAMS = SamplingParams(temperature=0.8, max_tokens=6, ignore_eos=True)


class Watched(LiveTree):
    """Keeps each picture as text, beside what the tree's own text form was then."""

    def __init__(self, **options):
        self.file = io.StringIO()
        terminal = {"force_terminal": True, "width": 100, "height": 20, "color_system": None} | options
        super().__init__(Console(file=self.file, **terminal), per_second=1e9)
        self.pictures = []

    def picture(self, trees):
        picture = super().picture(trees)
        console = Console(file=io.StringIO(), width=self.console.width)
        console.print(picture)
        texts = "\n".join(Tree(draw(tree)[0]).to_text(self.console.width) for tree in trees)
        self.pictures.append((console.file.getvalue().splitlines(), texts.splitlines()))
        self._due = 0.0
        return picture

    def update(self, trees):
        self._due = 0.0
        super().update(trees)


async def program(root, width=3):
    first = await generate(root.fork(width), PARAMS)
    first[0].prune()
    await generate(first[1].fork(2), PARAMS)
    return first[1]


def test_pictures_are_the_text_form_of_the_tree_as_it_grows():
    llm, view = tiny_llm(MODEL), Watched()
    [result] = llm.run(program, ["Hello"], seed=1, live=view)
    assert len(view.pictures) >= 12
    for picture, text in view.pictures:
        assert [line.rstrip() for line in picture] == [line.rstrip() for line in text]
    first, last = view.pictures[2][0], view.pictures[-1][0]
    assert first[0].startswith("▸ Hello  (5 tokens)") and [line[3] for line in first[1:]] == ["…"] * 3
    assert [line.lstrip("│├└─ ")[0] for line in last] == list("▸✗✓✓✓✓")
    assert len(last) == len(result.tree.nodes)
    assert "▸ Hello" in view.file.getvalue() and "\x1b[2K" in view.file.getvalue(), "drawn, and taken away"
    idle(llm)


def test_what_does_not_fit_the_terminal_is_left_out():
    llm, view = tiny_llm(MODEL), Watched(width=40, height=6)
    llm.run(program, ["A prompt that is longer than the terminal is wide", "two"], width=8, live=view)
    for picture, text in view.pictures:
        assert len(picture) <= 6 and all(len(line) <= 40 for line in picture)
        assert len(text) <= 5 or picture[-1].startswith("… ")
    captions = {picture[-1].strip() for picture, _ in view.pictures}
    assert "… 13 nodes above, 0 below" in captions
    idle(llm)


def test_nothing_is_drawn_where_there_is_no_terminal():
    file = io.StringIO()
    llm = tiny_llm(MODEL)
    with LiveTree(Console(file=file)) as view:
        llm.run(program, ["Hello"], live=view)
    assert file.getvalue() == ""
    with pytest.raises(ValueError, match="per_second must be positive, not 0"):
        LiveTree(per_second=0)
    idle(llm)


def test_drawings_are_seldom_and_end_with_an_error():
    async def fails(root):
        await generate(root.fork(3), SamplingParams(max_tokens=30, ignore_eos=True))
        raise KeyError("late")

    class Counted(LiveTree):
        count = 0

        def picture(self, trees):
            self.count += 1
            return super().picture(trees)

    llm = tiny_llm(MODEL)
    view = Counted(Console(file=io.StringIO(), force_terminal=True), per_second=0.01)
    with pytest.raises(KeyError, match="late"):
        llm.run(fails, ["Hello"], live=view)
    assert view.count == 1 and view._live is None
    idle(llm)


@pytest.mark.parametrize("live", [False, True])
def test_searches_can_be_watched(live, capsys, monkeypatch):
    seen = []
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(treewise.llm, "LLM", lambda **options: tiny_llm(MODEL))
    monkeypatch.setattr(LiveTree, "update", lambda self, trees: seen.append(self._live is not None))
    main(["search", "Hello", "--strategy=best_of_n", "--set", "n=2", "--set", "max_tokens=4", "--no-chat", "--text"]
         + ["--live"] * live)  # fmt: skip
    assert seen == [True] * len(seen) and bool(seen) == live
    assert "▸ Hello" in capsys.readouterr().out

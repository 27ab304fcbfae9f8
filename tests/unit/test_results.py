"""Drawings of a finished tree: stable, faithful, and safe whatever the text says."""

import json
import pickle
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from treewise.results import Tree, TreeNode, Usage, format_bytes, shorten

NASTY = '</script><script>alert(1)</script>\u2028"\\[red] & <!-- \x1b[31m \ud83d \x00'


def example(text: str = " 4") -> Tree:
    return Tree(
        nodes=[
            TreeNode(0, None, "2 + 2 =\n", [1, 2, 3, 4], [None] * 4, 0.0, "prompt"),
            TreeNode(1, 0, text, [604], [-0.25], -0.25, "kept", score=0.5, token_texts=[text]),
            TreeNode(2, 0, " 5", [605], [-3.0], -3.0, "pruned"),
            TreeNode(3, 1, ".", [18], [float("-inf")], float("-inf"), "finished", "stop", token_texts=["."]),
            TreeNode(4, 1, "!", [19], [-2.0], -2.25, "finished", "length", visits=3),
        ],
        usage=Usage(4, 4, 2, 8, 1_000_000, 2_500_000, 0.5),
        best=4,
        strategy="test",
    )


def test_text_drawing():
    assert example().to_text() == "\n".join(
        [
            "▸ 2 + 2 =⏎  (4 tokens)",
            "├─ ★  4  (1 token, logp -0.25, score 0.5)",
            "│  ├─ ✓ .  (1 token, logp -inf, stop)",
            "│  └─ ★ !  (1 token, logp -2.25, 3 visits, length)",
            "└─ ✗  5  (1 token, logp -3.00)",
        ]
    )


def test_a_tree_may_be_drawn_when_somebody_looks():
    drawn = []

    def draw():
        drawn.append(1)
        return example().nodes, 4

    facts = {"usage": example().usage, "strategy": "test"}
    tree = Tree.drawn_by(draw, **facts)
    assert not drawn and tree.usage.steps == 2
    assert tree == example() and tree.to_json() == example().to_json() and drawn == [1]
    assert pickle.loads(pickle.dumps(Tree.drawn_by(draw, **facts))) == example()
    assert replace(Tree.drawn_by(draw, **facts), model="m").best == 4
    with pytest.raises(ValueError, match="best: there is no node 9"):
        _ = Tree.drawn_by(lambda: ([], 9)).best
    with pytest.raises(AttributeError, match="'Tree' object has no attribute 'root'"):
        _ = tree.root


def test_only_children_are_not_indented():
    nodes = [TreeNode(0, None, "a", state="prompt")] + [TreeNode(i, i - 1, "b") for i in range(1, 3000)]
    lines = Tree(nodes).to_text().splitlines()
    assert len(lines) == 3000
    assert len({line.index("b") for line in lines[1:]}) == 1


def test_print_fits_the_terminal_and_keeps_no_markup():
    console = Console(file=StringIO(), width=60)
    example("[red] \x1b[31m" * 9).print(console)
    printed = console.file.getvalue()
    assert "\x1b" not in printed and "[red]" in printed
    assert max(map(len, printed.splitlines()[:5])) <= 60
    assert "4 tokens in 0.50 s (8.0 tokens/s)" in printed


def test_json_round_trip():
    tree = example(NASTY)
    assert Tree.from_json(tree.to_json()) == tree
    content = json.loads(tree.to_json())
    assert (content["format"], content["version"], content["best"]) == ("treewise.tree", 1, 4)
    assert content["nodes"][3]["logprob"] == "-Infinity"


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": "treewise.tree", "version": 2}', "not json"])
def test_json_of_another_kind_is_refused(text):
    with pytest.raises(ValueError):
        Tree.from_json(text)


class Scripts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.scripts, self.links = [], []

    def handle_starttag(self, tag, attrs):
        if tag == "script":
            self.scripts.append("")
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        if self.scripts:
            self.scripts[-1] += data


def test_html_is_one_safe_page(tmp_path):
    page = example(NASTY).to_html(tmp_path / "tree.html", title="<i>title</i> @@tree@@")
    assert (tmp_path / "tree.html").read_text(encoding="utf-8") == page
    parser = Scripts()
    parser.feed(page)
    assert parser.links == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page)
    assert len(parser.scripts) == 2
    assert Tree.from_json(parser.scripts[0]) == example(NASTY)
    assert "<title>&lt;i&gt;title&lt;/i&gt; @@tree@@</title>" in page


def test_dot_is_valid():
    drawing = example(NASTY).to_dot()
    assert drawing.count("->") == 4
    assert "style=dashed" in drawing and "penwidth=2.5" in drawing
    if shutil.which("dot"):
        subprocess.run(["dot", "-Tsvg"], input=drawing.encode(), check=True, capture_output=True)


@given(st.text(), st.integers(8, 40))
def test_shortened_text_is_one_visible_line(text, width):
    short = shorten(text, width)
    assert len(short) <= width
    assert short.isprintable()


def test_a_wrong_tree_is_refused():
    first, second = TreeNode(0, None, ""), TreeNode(1, 0, "")
    for nodes, best, message in [
        ([second, first], None, "before its parent"),
        ([first, first], None, "twice"),
        ([replace(first, state="eaten")], None, "not one of prompt, live"),
        ([first, second], 7, "best"),
    ]:
        with pytest.raises(ValueError, match=message):
            Tree(nodes, best=best)


def test_usage():
    assert example().usage.kv_ratio == 2.5
    assert Usage().tokens_per_second == 0 and Usage().kv_ratio == 1
    assert [format_bytes(n) for n in (12, 1200, 350e6, 1.2e9, 5e12)] == ["12 B", "1.2 kB", "350 MB", "1.2 GB", "5.0 TB"]

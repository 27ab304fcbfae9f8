"""Reports of studies: Markdown that is well formed, a page that loads nothing, numbers beside published ones."""

import re
from html.parser import HTMLParser

import pytest

from treewise.reproduce.figures import Panel, figure
from treewise.reproduce.report import Compared, Figure, Section, Table, write

FACTS = {"device": "a <machine>", "commit": "abc", "versions": "torch 2", "date": "today"}
VOID = {"meta", "img", "br", "hr", "link"}


class Page(HTMLParser):
    """Reads a page, complaining of tags that do not match, and keeps what it names and shows."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.cells, self.ids = [], [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href", "data") if name in found]
        self.ids += [found["id"]] if "id" in found else []
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append("")

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


@pytest.fixture
def sections():
    rows = [
        ["few | shot", "Radix", Compared(2.5, 5.0), 1],
        ["set", "DeFT & co", Compared("OOM", 12.34567), None],
        ["set", "own", Compared(12345.678, None), 2000],
    ]
    table = Table("Table 5: times", ["workload", "method", "seconds", "runs"], rows, note="As *told*.")
    curves = {"radix": ([1, 2, 4], [1.0, 2.0, 3.0]), "flatten": ([1, 2, 4], [1.0, 1.5, 2.0])}
    drawn = figure("Figure 1: lines", [Panel("a <b>", "step", "ms", curves, log_x=True)], "two lines", "A note.")
    png = Figure("Figure 2: dots", b"\x89PNG\r\n\x1a\n", "dots")
    return [Section("Times", "What `it` shows:\n\n- one\n- two", [table, *drawn, png]), Section("Words alone", "Done.")]


def test_markdown_has_a_column_for_each_side_of_a_comparison(sections, tmp_path):
    write("Title", sections, FACTS, tmp_path)
    lines = (tmp_path / "report.md").read_text("utf-8").splitlines()
    start = lines.index("### Table 5: times") + 2
    assert lines[start : start + 5] == [
        "| workload | method | seconds, ours | published | ours / published | runs |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| few \\| shot | Radix | 2.5 | 5 | 0.5 | 1 |",
        "| set | DeFT & co | OOM | 12.3 |  |  |",
        "| set | own | 12,346 |  |  | 2,000 |",
    ]
    pictures = [re.fullmatch(r"!\[(.+)\]\((.+)\)", line) for line in lines]
    named = {picture[2]: picture[1] for picture in pictures if picture}
    assert named == {"figures/figure-1-lines.svg": "two lines", "figures/figure-2-dots.png": "dots"}
    assert all((tmp_path / name).is_file() for name in named)


def test_the_page_is_well_formed_and_loads_nothing(sections, tmp_path):
    write("Title <1>", sections, FACTS, tmp_path)
    text = (tmp_path / "report.html").read_text("utf-8")
    page = Page(text)
    assert all(address.startswith(("data:image/", "#")) for address in page.addresses)
    assert {"script", "link", "iframe"}.isdisjoint(page.tags) and "url(" not in text and "@import" not in text
    links = [address[1:] for address in page.addresses if address.startswith("#")]
    assert len(links) == 5 and set(links) < set(page.ids)
    assert page.cells[:6] == ["few | shot", "Radix", "2.5", "5", "0.5", "1"] and len(page.cells) == 18
    assert "a &lt;machine&gt;" in text and "<title>Title &lt;1&gt;</title>" in text
    assert page.tags.count("img") == 2 and page.tags.count("table") == 1


def test_pictures_are_the_same_each_time(tmp_path):
    panel = Panel("a", "x", "y", {"one": ([1, 2], [3, 4])})
    [first], [second] = (figure("F", [panel], "alt") for _ in range(2))
    assert first == second and first.kind == "svg"
    assert figure("empty", [Panel("a", "x", "y", {"one": ([], [])})], "alt") == []


def test_two_figures_of_one_title_are_refused(tmp_path):
    twice = Figure("same", b"<svg/>", "alt")
    with pytest.raises(ValueError, match="same title"):
        write("T", [Section("S", parts=[twice, twice])], FACTS, tmp_path)

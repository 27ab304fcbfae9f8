"""A report of measurements: sections of text, tables and figures, as one Markdown file and one HTML page."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt


@dataclass(frozen=True)
class Compared:
    """A number of ours beside a published one; where there is none, a word such as OOM, or nothing.

    A column with such cells is shown as three: ours, published, and the first over the second.
    """

    ours: float | str | None
    published: float | str | None

    @property
    def ratio(self) -> float | None:
        """Ours over the published one, None if one of them is no number or the published one is 0."""
        return ratio(self.ours, self.published)


def ratio(one: float | str | None, other: float | str | None) -> float | None:
    """Divide, None where one of them is no number or the second is 0."""
    return one / other if isinstance(one, (int, float)) and isinstance(other, (int, float)) and other else None


Cell = str | int | float | Compared | None


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes
    ----------
    title : str
    columns : sequence of str
        Heads, with units.
    rows : sequence of sequence of Cell
        Numbers are shown with `digits` digits, None as nothing.
    note : str
        A paragraph of Markdown below it.
    digits : int
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    digits: int = 3


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes
    ----------
    title : str
    picture : bytes
        A PNG or an SVG file.
    alt : str
        What it shows, for those who do not see it.
    note : str
        A paragraph of Markdown below it.
    """

    title: str
    picture: bytes
    alt: str
    note: str = ""

    @property
    def kind(self) -> str:
        """What the file's name ends in."""
        return "png" if self.picture.startswith(b"\x89PNG") else "svg"


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs of Markdown, then tables and figures."""

    heading: str
    text: str = ""
    parts: Sequence[Table | Figure] = field(default_factory=list)


def write(title: str, sections: Sequence[Section], facts: Mapping[str, str], out: Path) -> None:
    """Write ``report.md`` with its pictures in ``figures``, and ``report.html``, which needs no other file.

    Parameters
    ----------
    title : str
        Of the whole.
    sections : sequence of Section
    facts : mapping of str to str
        What the head says: device, commit, versions, date.
    out : Path
        The folder, made where it is missing.
    """
    figures = [part for section in sections for part in section.parts if isinstance(part, Figure)]
    pictures = {figure_file(figure): figure for figure in figures}
    if len(pictures) < len(figures):
        raise ValueError("two figures of a report have the same title")
    out.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(figure.picture)
    text = "\n\n".join(paragraphs(title, sections, facts)) + "\n"
    (out / "report.md").write_text(text, encoding="utf-8")
    (out / "report.html").write_text(page(title, text, pictures), encoding="utf-8")


def figure_file(figure: Figure) -> str:
    """Name a figure's file, relative to the report."""
    return f"figures/{slug(figure.title)}.{figure.kind}"


def slug(text: str) -> str:
    """Make what an address may hold of a text.

    Examples
    --------
    >>> slug("Table 6 (attention), s")
    'table-6-attention-s'
    """
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def paragraphs(title: str, sections: Sequence[Section], facts: Mapping[str, str]) -> Iterator[str]:
    """Yield the blocks of the report in Markdown."""
    yield f"# {title}"
    yield "\n".join(f"- {name}: {value}" for name, value in facts.items())
    for section in sections:
        yield f"## {section.heading}"
        if section.text:
            yield section.text.strip()
        for part in section.parts:
            yield f"### {part.title}"
            yield markdown_table(part) if isinstance(part, Table) else f"![{part.alt}]({figure_file(part)})"
            if part.note:
                yield part.note.strip()


def markdown_table(table: Table) -> str:
    """Write a table in Markdown; columns of numbers to the right."""
    heads: list[str] = []
    columns: list[list[str]] = []
    right: list[bool] = []
    for number, head in enumerate(table.columns):
        cells = [row[number] for row in table.rows]
        compared = [cell if isinstance(cell, Compared) else Compared(None, None) for cell in cells]
        if any(isinstance(cell, Compared) for cell in cells):
            heads += [f"{head}, ours", "published", "ours / published"]
            ours = [cell.ours if isinstance(cell, Compared) else cell for cell in cells]
            sides: list[list[Any]] = [ours, [cell.published for cell in compared], [cell.ratio for cell in compared]]
        else:
            heads.append(head)
            sides = [cells]
        columns += [[cell_text(cell, table.digits) for cell in side] for side in sides]
        right += [any(isinstance(cell, (int, float)) for cell in side) for side in sides]
    heads = [head.replace("|", "\\|") for head in heads]
    lines = [heads, ["---:" if numbers else "---" for numbers in right], *zip(*columns, strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell_text(cell: str | int | float | None, digits: int) -> str:
    """Write one cell; numbers as short as so many digits allow."""
    match cell:
        case None:
            return ""
        case float() if abs(cell) >= 1000:
            return f"{cell:,.0f}"
        case float():
            return f"{cell:.{digits}g}"
        case int():
            return f"{cell:,}"
    return cell.replace("|", "\\|")


STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --paper: #fff; --line: #d8d8de; --soft: #f4f4f7; --link: #0b57d0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e9; --paper: #16161a; --line: #3a3a42; --soft: #212127; --link: #8ab4f8 }
}
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word }
h1 { font-size: 1.7rem } h2 { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: 1rem }
h3 { font-size: 1.05rem; margin: 2rem 0 .5rem }
a { color: var(--link) } code { background: var(--soft); padding: .1em .3em; border-radius: 3px; font-size: .9em }
pre { background: var(--soft); padding: .75rem; overflow-x: auto } pre code { padding: 0 }
nav { columns: 18rem; font-size: .9rem; background: var(--soft); padding: .75rem 1rem; border-radius: 6px }
nav a { display: block; text-decoration: none; padding: .1rem 0 } nav .deeper { padding-left: 1rem; font-size: .93em }
.table { overflow-x: auto } table { border-collapse: collapse; font-size: .87rem; font-variant-numeric: tabular-nums }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; white-space: nowrap }
th { text-align: left; background: var(--soft); white-space: normal; vertical-align: bottom }
tbody tr:hover { background: var(--soft) }
img { max-width: 100%; height: auto; background: #fff; border-radius: 6px }
"""


def page(title: str, text: str, pictures: Mapping[str, Figure]) -> str:
    """Turn the report's Markdown into a page with its pictures in it, which loads nothing."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    headings = [
        (token, tokens[place + 1].content) for place, token in enumerate(tokens) if token.type == "heading_open"
    ]
    for number, (token, _) in enumerate(headings):
        token.attrSet("id", f"part-{number}")
    for image in (child for token in tokens for child in token.children or () if child.type == "image"):
        figure = pictures[str(image.attrGet("src"))]
        mime = {"png": "image/png", "svg": "image/svg+xml"}[figure.kind]
        image.attrSet("src", f"data:{mime};base64,{base64.b64encode(figure.picture).decode()}")
    body = markdown.renderer.render(tokens, markdown.options, {})
    # A table that is wider than a phone scrolls in a box of its own.
    body = body.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    links = "\n".join(
        f'<a class="{"deeper" if token.tag == "h3" else "section"}" href="#{token.attrGet("id")}">{escape(words)}</a>'
        for token, words in headings[1:]
    )
    before, after = body.split("</ul>", 1)  # the facts come first
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{before}</ul>\n<nav>\n{links}\n</nav>\n{after}</body>\n</html>\n"
    )

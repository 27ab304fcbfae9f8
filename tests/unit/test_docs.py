"""What the documents name is there."""

import re
from pathlib import Path

import pytest
from tiny import ChatBytes, idle, tiny_llm

import treewise

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "least"), [("faults.md", 50), ("sparsity.md", 10)])
def test_every_test_that_a_list_of_faults_names_exists(page, least):
    defined = set()
    for path in (ROOT / "tests").rglob("*.py"):
        defined |= set(re.findall(r"def (test_\w+)", path.read_text("utf-8")))
    named = re.findall(r"`(test_\w+)(…?)`", (ROOT / "docs" / page).read_text("utf-8"))
    assert len(named) > least
    missing = [
        name
        for name, shortened in named
        if not (any(test.startswith(name) for test in defined) if shortened else name in defined)
    ]
    assert not missing


def reference():
    """The examples in the tables of the reference of programs."""
    page = (ROOT / "docs" / "programs.md").read_text("utf-8")
    tables = page.partition("\n## Reference\n")[2].partition("\n### What is raised\n")[0]
    return re.findall(r"^\| `(.+?)` \|", tables, flags=re.MULTILINE)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.parametrize("example", reference())
def test_examples_of_the_reference_run(example):
    names = {name: getattr(treewise, name) for name in treewise.__all__} | {"print": lambda piece: None}
    body = ["[trunk] = root.fork()", "branch, other = branches = trunk.fork(2)", "values = [1.0, 2.0]", example]
    exec("async def program(root):\n" + "".join(f"    {line}\n" for line in body), names)
    llm = tiny_llm(codec=ChatBytes(), max_model_len=40)
    llm.run(names["program"], ["Hello"], seed=0)
    idle(llm)


def headings(page):
    """What a link to a part of a page may name."""
    lines = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        for target, part in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text("utf-8")):
            to = page.parent / target if target else page
            assert to.exists(), f"{page.name} links to {target}"
            assert not part or part in headings(to), f"{page.name} links to #{part} of {to.name}"

"""What the documents name is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_list_of_faults_names_exists():
    defined = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        defined |= set(re.findall(r"def (test_\w+)", path.read_text("utf-8")))
    named = re.findall(r"`(test_\w+)(…?)`", (ROOT / "docs" / "faults.md").read_text("utf-8"))
    assert len(named) > 50
    missing = [
        name
        for name, shortened in named
        if not (any(test.startswith(name) for test in defined) if shortened else name in defined)
    ]
    assert not missing


def test_links_between_documents_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

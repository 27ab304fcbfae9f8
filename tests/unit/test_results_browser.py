"""The HTML page in a real browser, where there is one: what it shows, and what its controls do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from treewise.results import Tree, TreeNode, Usage

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")

SCRIPT = """
<script>
window.faults = [];
addEventListener("error", (event) => faults.push(event.message));
</script>
"""
DRIVER = """
<script>
const all = (query) => [...document.querySelectorAll(query)];
const cardOf = (text) => all(".card").find((card) => card.querySelector(".said, s")?.textContent.includes(text));
const press = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const type = (text) => { $("find").value = text; $("find").dispatchEvent(new Event("input")); };
const shown = () => all(".card").length;
const scale = () => Number(/scale\\(([^)]+)\\)/.exec(world.style.transform)[1]);
const report = {};

report.cards = shown();
report.text = cardOf("good").innerText;
report.pruned = { cards: all(".card.pruned").length,
  colour: getComputedStyle(cardOf("bad").querySelector(".line")).color,
  kept: getComputedStyle(cardOf("good").querySelector(".said")).color };
report.doubts = all(".card .token").map((token) => token.style.getPropertyValue("--doubt"));
report.painted = getComputedStyle(cardOf("good").querySelector(".token")).backgroundColor;
$("colour").click();
report.plain = getComputedStyle(cardOf("good").querySelector(".token")).backgroundColor;
$("colour").click();

let before = scale();
press("+");
report.zoomed = scale() / before;
canvas.dispatchEvent(new WheelEvent("wheel", { deltaY: -50, ctrlKey: true, cancelable: true, bubbles: true }));
report.wheeled = scale() / before;
press("0");

cardOf("good").querySelector(".more").click();
report.folded = shown();
report.hidden = cardOf("good").querySelector(".more").textContent;
type("NEEDLE");
report.found = $("found").textContent;
press("Enter", $("find"));
report.revealed = shown();
report.selected = all('.card[aria-selected="true"]').map((card) => card.innerText);
report.missed = all(".card.missed").length;
type("");

all('[data-pruned="hide"]')[0].click();
report.without = shown();
type("bad");
press("Enter", $("find"));
report.with = all(".card.pruned").length;
type("");
report.facts = (cardOf("good").click(), $("pane-node").innerText);
report.answers = all(".answers li").length;
const transform = world.style.transform;
canvas.dispatchEvent(new PointerEvent("pointerdown", { button: 0, clientX: 5, clientY: 5, bubbles: true }));
dispatchEvent(new PointerEvent("pointermove", { clientX: 45, clientY: 25 }));
dispatchEvent(new PointerEvent("pointerup"));
report.panned = world.style.transform !== transform;
report.requests = performance.getEntriesByType("resource").length;
report.faults = faults;
document.body.append(make("pre", { id: "report" }, JSON.stringify(report)));
</script>
"""


def example():
    return Tree(
        nodes=[
            TreeNode(0, None, "A question?", [1, 2], [None] * 2, 0.0, "prompt", visits=9),
            TreeNode(
                1,
                0,
                " a good step",
                [3, 4, 5],
                [-0.1, -3.0, -0.7],
                -3.8,
                "kept",
                None,
                0.625,
                [" a", " good", " step"],
                7,
            ),
            TreeNode(2, 0, " a bad <b>step</b>", [6], [-1.0], -1.0, "pruned", None, 0.1, [" a bad <b>step</b>"], 2),
            TreeNode(3, 1, " the answer", [7], [-0.5], -4.3, "finished", "stop", 1.0, [" the answer"], 4),
            TreeNode(
                4, 1, " in the hay: needle", [8], [-2.0], -5.8, "finished", "length", 0.5, [" in the hay: needle"], 2
            ),
            TreeNode(5, 2, " worse", [9], [-2.0], -3.0, "pruned"),
        ],
        usage=Usage(2, 7, 5, 9, 1_000_000, 2_500_000, 0.5),
        best=3,
        strategy="mcts",
    )


def browse(page, folder):
    path = folder / "page.html"
    path.write_text(page.replace("<style>", SCRIPT + "<style>", 1).replace("</body>", DRIVER + "</body>"), "utf-8")
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,900",
        f"--user-data-dir={folder}/user",
    )
    command = [BROWSER, *options, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()]
    content = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    report = re.search(r'<pre id="report">(.*?)</pre>', content, re.DOTALL)
    assert report, f"the page's scripts did not come to their end: {content[-2000:]}"
    return json.loads(report[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def test_the_page_shows_and_moves(tmp_path):
    report = browse(example().to_html(), tmp_path)
    assert report["faults"] == []
    assert report["requests"] == 0, "the page needs nothing else"
    assert report["cards"] == 6
    for fact in ("3 tok", "log p −3.80", "score 0.63", "7×", "a good step"):
        assert fact in report["text"]
    assert report["pruned"]["cards"] == 2 and report["pruned"]["colour"] != report["pruned"]["kept"]
    # A token is the more coloured the less likely it was: 0.6 * (1 - p).
    assert report["doubts"][:3] == ["0.057", "0.570", "0.302"]
    assert report["painted"] != report["plain"] == "rgba(0, 0, 0, 0)"
    assert report["zoomed"] == pytest.approx(1.25, abs=1e-3) and report["wheeled"] > 1.25 and report["panned"]
    assert (report["folded"], report["hidden"]) == (4, "+2")
    assert (report["found"], report["revealed"]) == ("1", 6), "a search unfolds what it finds"
    assert ["needle" in text for text in report["selected"]] == [True] and report["missed"] == 5
    assert report["without"] == 4 and report["with"] >= 1, "a search shows what was hidden"
    for fact in ("Score\n0.625", "Visits\n7", "Log-probability"):
        assert fact in report["facts"]
    assert report["answers"] == 2

"""Draw docs/images/reproduce.png: the top of a report and one of its figures, in a headless Chromium.

`python docs/images/make_report.py reproduced/deft/report.html [FILE]`
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

SCALE = 1.5
FLAGS = ["--no-sandbox", "--disable-gpu"]


def main(report: Path, target: Path) -> None:
    """Open the report twice side by side, and take the picture."""
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 860, "height": 980}, device_scale_factor=SCALE)
        page.goto(report.resolve().as_uri())
        pictures = [Path(folder) / name for name in ("top.png", "figure.png")]
        page.screenshot(path=pictures[0])
        page.get_by_role("heading", name="Table 7, decode").evaluate("each => each.scrollIntoView()")
        page.mouse.wheel(0, -10)
        page.wait_for_timeout(300)
        page.screenshot(path=pictures[1])
        browser.close()
        left, right = map(Image.open, pictures)
        both = Image.new("RGB", (left.width + right.width + 12, left.height), "#888888")
        both.paste(left, (0, 0))
        both.paste(right, (left.width + 12, 0))
        both.quantize(128).save(target, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).with_name("reproduce.png")))

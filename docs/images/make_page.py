"""Draw docs/images/page.png: the server's page after a search with the built-in model, in a headless Chromium.

`python docs/images/make_page.py [FILE]`
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

QUESTION = "Why is the sky blue?"
STRATEGY = "mcts"
SETTINGS = {"iterations": 8, "depth": 2, "width": 3, "thought_tokens": 20, "answer_tokens": 32, "seed": 4}
SCALE = 1.5
FLAGS = ["--no-sandbox", "--disable-gpu"]


def main(target: Path) -> None:
    """Serve the model, ask, and take the picture."""
    command = [sys.executable, "-m", "treewise", "serve", "smollm2-135m", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, sync_playwright() as playwright:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
            page = browser.new_page(viewport={"width": 1440, "height": 860}, device_scale_factor=SCALE)
            page.goto(url)
            page.locator("#strategy option").nth(1).wait_for(state="attached")
            page.select_option("#strategy", STRATEGY)
            page.get_by_text("Parameters").click()
            for name, value in SETTINGS.items():
                page.fill(f"#parameter-{name}", str(value))
            page.get_by_text("Parameters").click()
            page.fill("#prompt", QUESTION)
            page.click("#send")
            page.locator("article:not([aria-busy])").wait_for(timeout=300_000)
            page.click("#chosen")
            page.click("#fit")
            page.mouse.move(0, 0)
            page.wait_for_timeout(1500)  # until the tree has come to rest
            with tempfile.NamedTemporaryFile(suffix=".png") as picture:
                page.screenshot(path=picture.name)
                Image.open(picture.name).convert("RGB").quantize(64).save(target, optimize=True)
            browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_name("page.png")))

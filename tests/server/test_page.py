"""The page in a real browser, where there is one, in front of a real server with a tiny model."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from threaded import Served, served
from tiny import EOS, ChatBytes, tiny_llm, tiny_model

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ATTACK = '<img src=x onerror="window.hurt = 1"><script>window.hurt = 1</script>'

sync_api = pytest.importorskip("playwright.sync_api")
TIMEOUT = 15_000  # milliseconds
expect = sync_api.expect
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


class Words(ChatBytes):
    """A tokenizer whose tokens are words: a random model's text can be read then, and holds an attack."""

    eos_token_ids = frozenset()  # texts end by their lengths only
    words = (" one", " two", " <b>three</b>", f" {ATTACK}", "\n", " é", " 👍", " five")

    def token_bytes(self, token: int) -> bytes:
        turn, place = divmod(token, len(self.words))
        return b"" if token == EOS else f"{self.words[place]}{turn}".encode()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny_llm(tiny_model(max_positions=16384), codec=Words(), num_kv_slots=65536)) as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser, server):
    """A page that has nothing to complain of, and asks nobody but its server."""
    context = browser.new_context(viewport={"width": 1400, "height": 860})
    page = context.new_page()
    page.set_default_timeout(TIMEOUT)
    complaints, asked = [], []
    page.on(
        "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
    )
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.complaints = complaints
    page.goto(server.url)
    expect(page.locator("#health")).to_have_text("ready")
    expect(page.locator("#strategy option")).not_to_have_count(1)
    yield page
    assert page.evaluate("window.hurt") is None
    assert complaints == []
    assert [url for url in asked if not url.startswith((server.url, "blob:" + server.url))] == []
    context.close()


def ask(page, text, kind="chat", strategy="", **parameters):
    page.get_by_role("radio", name=kind.capitalize()).check()
    page.select_option("#strategy", strategy)
    page.locator("#settings").evaluate("(details) => { details.open = true; }")
    for name, value in parameters.items():
        entry = page.locator(f"#parameter-{name}")
        if entry.evaluate("(entry) => entry.tagName") == "SELECT":
            entry.select_option(str(value))
        else:
            entry.fill(str(value))
    page.locator("#settings").evaluate("(details) => { details.open = false; }")
    page.fill("#prompt", text)
    page.click("#send")


def last(page):
    return page.locator("article").last


def ended(page):
    expect(last(page)).not_to_have_attribute("aria-busy", "true", timeout=30_000)


def test_a_completion_shows_how_sure_its_tokens_were(page):
    ask(page, "Count: ", "completion", n=1, max_tokens=12, logprobs=3, seed=1)
    ended(page)
    tokens = last(page).locator(".output .token")
    assert tokens.count() > 4
    shades = tokens.evaluate_all("(all) => all.map((token) => token.style.getPropertyValue('--doubt'))")
    assert all(0 <= float(shade) <= 0.5 for shade in shades) and len(set(shades)) > 1
    tokens.nth(1).hover()
    tip = page.locator("#tip")
    expect(tip).to_contain_text("log-prob −")
    assert tip.locator("li").count() in (3, 4)  # the likeliest, and the one that was drawn
    expect(tip.locator("li.taken")).to_have_count(1)
    # The same for the keyboard, and for whoever hears the page.
    page.mouse.move(700, 400)
    last(page).locator(".output .text").focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_be_visible()
    expect(page.locator("#announce")).to_contain_text("log-prob")
    # One sample is a tree with one leaf, which is read in the pane beside it.
    expect(page.locator(".item")).to_have_count(2)
    page.locator(".item").last.click()
    expect(page.locator("#node")).to_contain_text("a token")
    assert page.locator("#node .here .token").count() == tokens.count()


def test_a_chat_goes_on(page, server):
    ask(page, "Hello", "chat", n=2, max_tokens=6, seed=3)
    ended(page)
    expect(last(page).locator(".pager")).to_contain_text("1 of 2")
    first = last(page).locator(".output").inner_text()
    last(page).get_by_label("Next answer").click()
    assert last(page).locator(".output").inner_text() != first
    with page.expect_request("**/v1/chat/completions") as request:
        ask(page, "And then?", "chat", n=1, max_tokens=4)
    messages = request.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == "Hello" and messages[2]["content"] == "And then?"
    ended(page)
    # The first turn's tree can be looked at again.
    page.locator("article").first.get_by_role("button", name="Tree").click()
    expect(page.locator(".item")).to_have_count(3)


def test_a_search_grows_and_its_choice_is_marked(page):
    page.evaluate(
        """() => { window.sizes = []; new MutationObserver(() => sizes.push(document.querySelectorAll('.item').length))
            .observe(document.getElementById('nodes'), { childList: true }); }"""
    )
    ask(page, "Think", "completion", "beam", beam_width=4, max_tokens=24)
    ended(page)
    sizes = page.evaluate("window.sizes")
    assert len(set(sizes)) > 1 and sizes[0] < max(sizes), "it came at once, and did not grow"
    expect(page.locator("#caption")).to_contain_text("pruned")
    chosen, pruned = page.locator(".item.chosen"), page.locator(".item.pruned")
    assert chosen.count() >= 1 and pruned.count() >= 1
    colour = "(item) => getComputedStyle(item.querySelector('.said')).color"
    assert chosen.first.evaluate(colour) != pruned.first.evaluate(colour)
    # The chosen node's path is the answer.
    page.click("#chosen")
    expect(page.locator("#node h2")).to_have_text("Chosen")
    answer = last(page).locator(".output .text").text_content()
    assert answer and page.locator("#node .text").text_content() == answer
    expect(page.locator("#node dl")).to_contain_text("score")
    expect(page.locator('.item[aria-selected="true"]')).to_have_count(1)
    # What was given up can be folded, and unfolded.
    before = page.locator(".item").count()
    page.click("#fold")
    expect(page.locator(".item.folded").first).to_be_attached()
    assert page.locator(".item").count() < before
    page.click("#fold")
    expect(page.locator(".item")).to_have_count(before)
    with page.expect_download() as download:
        page.click("#save")
    assert download.value.suggested_filename == "tree.json"


def test_keys_move_over_the_tree(page):
    ask(page, "Think", "completion", "best_of_n", n=3, max_tokens=6, seed=2)
    ended(page)
    expect(page.locator("#nodes")).to_have_role("tree")
    page.locator(".item.prompt").focus()
    page.keyboard.press("ArrowRight")
    focused = page.locator(".item:focus")
    expect(focused).to_have_class(re.compile("chosen"))
    expect(focused).to_have_attribute("aria-label", re.compile("chosen path.*log-probability"))
    page.keyboard.press("Enter")
    expect(page.locator("#node h2")).to_have_text("Chosen")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".item:focus")).to_have_class(re.compile("prompt"))
    zoom = "() => new DOMMatrix(getComputedStyle(document.getElementById('world')).transform).a"
    before = page.evaluate(zoom)
    page.keyboard.press("+")
    page.wait_for_function(f"(before) => ({zoom})() > 1.1 * before", arg=before)
    box = page.locator("#canvas").bounding_box()
    where = "() => new DOMMatrix(getComputedStyle(document.getElementById('world')).transform).e"
    page.wait_for_timeout(600)  # until the zoom has come to its end
    left = page.evaluate(where)
    page.mouse.move(box["x"] + 300, box["y"] + box["height"] - 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 380, box["y"] + box["height"] - 80, steps=4)
    page.mouse.up()
    page.wait_for_function(f"(left) => Math.abs(({where})() - left - 80) < 1", arg=left)


def test_stop_ends_the_request(page, server):
    ask(page, "Go on", "chat", n=4, max_tokens=16000)
    expect(last(page).locator(".output .token, .output .text").first).to_be_attached()
    page.click("#stop")
    ended(page)
    expect(last(page).locator(".facts")).to_contain_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    server.settled()


def test_errors_are_told(page, server):
    ask(page, "Hello", "chat", n=1, temperature=-1)
    ended(page)
    alert = last(page).get_by_role("alert")
    expect(alert).to_contain_text("temperature")
    expect(page.locator("#prompt")).to_have_value("Hello")  # to be put right
    assert len(page.complaints) == 1 and "400" in page.complaints.pop()  # the browser's own line of a bad status


def test_text_is_never_markup(page):
    ask(page, ATTACK, "chat", "best_of_n", n=4, max_tokens=16, seed=5)
    ended(page)
    content = page.locator("body").text_content()
    assert content.count("<script>window.hurt") >= 2, "the prompt and the model's words are shown as they are"
    for tag in ("img[src=x]", "article b", "#nodes script", ".said b b"):
        expect(page.locator(tag)).to_have_count(0)
    page.locator(".item").last.click()
    assert page.evaluate("window.hurt") is None


def test_a_key_is_kept_in_the_tab(browser):
    with served(tiny_llm(codec=Words()), api_key=("secret",)) as server:
        page = browser.new_context().new_page()
        page.goto(server.url)
        expect(page.locator("#health")).to_have_text("needs an API key")
        page.get_by_text("API key", exact=True).first.click()
        page.fill("#key", "secret")
        page.keyboard.press("Enter")
        expect(page.locator("#health")).to_have_text("ready")
        ask(page, "Hello", "chat", n=1, max_tokens=3)
        ended(page)
        assert last(page).locator(".output .text").text_content()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        page.reload()
        expect(page.locator("#health")).to_have_text("ready")
        page.context.close()


def test_the_server_allows_nothing_from_elsewhere(page):
    with page.expect_response("**/") as response:
        page.reload()
    policy = response.value.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


@pytest.mark.parametrize("width", [360, 768, 1100])
def test_narrow_windows_lose_nothing(page, width):
    page.set_viewport_size({"width": width, "height": 700})
    expect(page.locator("#send")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ask(page, "Hello", n=1, max_tokens=8)
    ended(page)
    if width < 760:
        page.get_by_role("button", name="Tree", exact=True).first.click()
    page.locator(".item").last.click()
    expect(page.locator("#node")).to_be_visible()
    expect(page.locator("#node h2")).to_have_text("Chosen")

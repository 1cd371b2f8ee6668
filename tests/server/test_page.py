"""The playground at / in a real browser. Needs Chromium and playwright (`pip install playwright`); skipped without."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.local_server import Running, running

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

STOPPED = "document.getElementById('stop').hidden"
SIZES = {"phone": (390, 844), "wide": (1440, 900)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, served: Running) -> Iterator[Any]:
    with opened(browser, served.url) as found:
        yield found


class opened:  # noqa: N801  # reads as a function
    """The page in a window of its own; leaving it fails if the browser complained of anything."""

    def __init__(self, browser: Any, url: str, size: str = "wide", scheme: str = "light") -> None:
        width, height = SIZES[size]
        self.context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.page, self.url, self.complaints = self.context.new_page(), url, []

    def __enter__(self) -> Any:
        self.page.on("console", lambda message: message.type == "error" and self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(self.url)
        self.page.wait_for_function("document.getElementById('served').textContent !== 'connecting'")
        return self.page

    def __exit__(self, kind: object, *_: object) -> None:
        self.context.close()
        if kind is None:
            assert not self.complaints, self.complaints


def ask(page: Any, question: str, length: int = 24) -> None:
    set_length = "(slider, value) => { slider.min = 1; slider.step = 1; slider.value = value; }"
    page.locator("#length").evaluate(set_length, length)
    page.fill("#question", question)
    page.keyboard.press("Enter")


def test_a_chat_streams_an_answer_with_every_token_marked(page: Any, served: Running) -> None:
    assert "p-eagle" in page.inner_text("#served")
    ask(page, "the user asks")
    page.wait_for_function(STOPPED)
    answer = page.locator(".message.assistant")
    kinds = answer.locator(".token").evaluate_all("tokens => tokens.map((token) => token.title)")
    assert len(kinds) > 3
    assert set(kinds) <= {"prefill", "accepted", "recovered", "bonus"}
    body = {"messages": [{"role": "user", "content": "the user asks"}], "max_tokens": 24, "temperature": 0}
    expected = served.http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert (
        answer.evaluate("item => [...item.querySelectorAll('.token')].map((t) => t.textContent).join('')") == expected
    )
    assert float(page.inner_text("#figure-length")) >= 1
    assert page.locator(".depth").count() == 4, "one for each draft token"


def test_a_race_shows_both_answers_and_says_that_they_are_the_same(page: Any) -> None:
    page.click("#tab-race")
    ask(page, "the user asks", length=40)
    page.wait_for_function("document.getElementById('verdict').textContent.includes('times the speed')")
    assert "The two answers are the same, word for word." in page.inner_text("#verdict")
    assert page.inner_text("#answer-plain") == page.inner_text("#answer-drafts") != ""
    assert float(page.inner_text("#speed-plain")) > 0
    assert page.locator("#answer-plain .token.accepted").count() == 0


def test_a_reload_in_the_middle_keeps_what_was_said(page: Any, served: Running) -> None:
    ask(page, "the user asks", length=200)
    page.wait_for_function("document.querySelectorAll('.message.assistant .token').length > 2")
    page.reload()
    page.wait_for_function("document.querySelectorAll('.message').length === 2")
    assert page.locator(".message.assistant .token").count() > 2
    assert page.inner_text(".message .end") in ("cut off by a reload", "reached the maximum length")
    assert served.wait_until_idle().num_pages_used == 0, "the answer nobody reads any more is given up"


def test_the_page_works_from_the_keyboard(page: Any) -> None:
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.locator("#tab-race").get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowLeft")
    ask(page, "the user asks", length=200)
    page.wait_for_function("document.querySelectorAll('.message.assistant .token').length > 0")
    page.keyboard.press("Escape")
    page.wait_for_function(STOPPED)
    assert page.inner_text(".message .end") in ("stopped", "reached the maximum length")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_sideways(browser: Any, served: Running, size: str, scheme: str, tmp_path: Path) -> None:
    with opened(browser, served.url, size, scheme) as page:
        ask(page, "the user asks")
        page.wait_for_function(STOPPED)
        page.screenshot(path=tmp_path / "page.png")
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_server_with_keys_is_asked_with_one(browser: Any) -> None:
    with running(keys=("secret",)) as served:
        window = opened(browser, served.url)
        with window as page:
            page.wait_for_selector("#key-form:not([hidden])")
            page.fill("#key", "secret")
            page.keyboard.press("Enter")
            page.wait_for_function("document.getElementById('served').textContent.includes('p-eagle')")
            window.complaints.clear()  # the browser's own line about the 401 that told the page to ask
            ask(page, "the user asks")
            page.wait_for_function(STOPPED)
            assert page.locator(".message.assistant .token").count() > 3

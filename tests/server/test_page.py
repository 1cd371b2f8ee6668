"""The playground at / in a real browser. Needs Chromium and playwright (`pip install playwright`); skipped without."""

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.local_server import Running, running
from harness.tiny_models import tiny_drafter, tiny_target
from peagle.engine.llm import LLM

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")

CHAT = "/v1/chat/completions"
STOPPED = "document.getElementById('stop').hidden"
QUESTION = """the user's "ask"\n$HOME `x` \\ """.strip()
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


def test_the_box_has_a_prompt_ready(page: Any) -> None:
    assert page.input_value("#question").strip()
    page.click("#tab-race")
    assert page.input_value("#question").strip()


def race(page: Any, length: int = 40) -> str:
    page.click("#tab-race")
    ask(page, "the user asks", length)
    page.wait_for_function("document.getElementById('verdict').classList.contains('told')")
    return str(page.inner_text("#verdict"))


def test_a_race_shows_both_answers_and_says_that_they_are_the_same(page: Any) -> None:
    assert "The answers are the same, token for token." in race(page)
    assert page.inner_text("#answer-plain") == page.inner_text("#answer-drafts") != ""
    assert float(page.inner_text("#speed-plain")) > 0
    assert page.locator("#answer-plain .token.accepted").count() == 0
    assert not page.locator("#evidence").is_visible()


WATCH = """
window.shown = [];
const watched = (name) => new MutationObserver((found) => {
  for (const each of found) for (const _ of each.addedNodes) window.shown.push(name);
}).observe(document.getElementById(`answer-${name}`), { childList: true });
watched("plain"); watched("drafts");
window.shownAtFetch = [];
window.order = [];
const real = window.fetch;
window.fetch = async (path, options) => {
  const isDrafted = JSON.parse(options.body).speculation.enabled;
  window.shownAtFetch.push(window.shown.length);
  window.order.push(["begin", isDrafted]);
  const response = await real(path, options);
  const reader = response.clone().body.pipeThrough(new TextDecoderStream()).getReader();
  const watch = ({ value, done }) => {
    if (value?.includes("[DONE]")) window.order.push(["end", isDrafted]);
    if (!done) reader.read().then(watch);
  };
  reader.read().then(watch);
  return response;
};
undefined;  // playwright would call a function
"""


def test_each_lane_is_measured_alone_and_then_both_are_replayed(page: Any) -> None:
    page.evaluate(WATCH)
    race(page, length=120)
    order = page.evaluate("order")
    lanes = [["begin", False], ["end", False], ["begin", True], ["end", True]]
    assert order == [["begin", True], ["end", True], *lanes], "a warm-up, then one lane after the other"
    assert set(page.evaluate("shownAtFetch")) == {0}, "nothing is drawn while a lane is measured"
    shown = page.evaluate("shown")
    assert shown.count("plain") == shown.count("drafts") > 30
    last_of_plain = len(shown) - 1 - shown[::-1].index("plain")
    assert shown.index("drafts") < last_of_plain, "one after the other"
    text = page.inner_text("#answer-drafts")
    page.click("#replay")
    page.wait_for_function(f"{STOPPED} && document.getElementById('verdict').classList.contains('told')")
    assert page.inner_text("#answer-drafts") == text
    assert page.evaluate("order") == order, "a replay asks the server nothing"


@pytest.fixture(scope="module")
def tied() -> Iterator[Running]:
    """A server whose target likes token 27 best and token 28 less by 1e-5 of its logit."""

    def load() -> LLM:
        target = tiny_target()
        table = target.model.get_input_embeddings().weight
        with torch.no_grad():
            table[27] *= 1.2
            table[28] = table[27] * (1 - 1e-5)
        return LLM(target, tiny_drafter(target), 4, max_batch=8, max_length=256, page_size=16, verify_tokens=0)

    with running(load) as found:
        yield found


@pytest.mark.parametrize(("token", "bias", "is_near_tie"), [(28, 0.01, True), (53, 90, False)])
def test_a_difference_is_called_a_near_tie_only_with_the_evidence(
    browser: Any, tied: Running, token: int, bias: float, is_near_tie: bool
) -> None:
    def push(route: Any) -> None:
        body = route.request.post_data_json
        extra = {"logit_bias": {str(token): bias}} if body["speculation"]["enabled"] else {}
        route.continue_(post_data=json.dumps(body | extra))

    messages = [{"role": "user", "content": "the user asks"}]
    prompt = tied.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    asked = {"prompt": [[*prompt, 27], [*prompt, token]], "echo": True, "max_tokens": 0, "logprobs": 1}
    rows = [each["logprobs"] for each in tied.http.post("/v1/completions", json=asked).json()["choices"]]
    best, other = (row["token_logprobs"][-1] for row in rows)
    assert (best - other <= 1e-3) is is_near_tie
    with opened(browser, tied.url) as page:
        page.route(f"**{CHAT}", push)
        verdict, evidence = race(page), page.inner_text("#evidence")
        differing = page.locator(".token.differs").all_inner_texts()
    assert ("near tie" in verdict) is is_near_tie and ("This is a difference" in verdict) is not is_near_tie
    assert "from token 1 on" in verdict
    for row in rows:
        assert json.dumps(row["tokens"][-1]) in evidence and f"{row['token_logprobs'][-1]:.4f}" in evidence
    assert f"{best - other:.4f}" in evidence and "0.001" in evidence
    assert differing == [row["tokens"][-1] for row in rows]


def test_without_evidence_a_difference_is_a_difference(browser: Any, tied: Running) -> None:
    def push(route: Any) -> None:
        body = route.request.post_data_json
        extra = {"logit_bias": {"28": 0.01}} if body["speculation"]["enabled"] else {}
        route.continue_(post_data=json.dumps(body | extra))

    def spoil(route: Any) -> None:
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"logprobs": 99}))

    window = opened(browser, tied.url)
    with window as page:
        page.route(f"**{CHAT}", push)
        page.route("**/v1/completions", spoil)
        verdict = race(page)
        assert "near tie" not in verdict and "This is a difference" in verdict
        assert "logprobs" in page.inner_text("#evidence"), "the server's reason"
        window.complaints.clear()  # the browser's own line about the 400


def test_sampled_answers_are_not_judged(page: Any) -> None:
    page.locator("#temperature").evaluate("slider => { slider.value = 1.5; }")
    verdict = race(page)
    assert "sampled" in verdict and "near tie" not in verdict and not page.locator("#evidence").is_visible()


@pytest.mark.parametrize("lane", ["chat", "plain", "drafts"])
def test_copy_as_curl_copies_the_request_that_the_page_sends(browser: Any, lane: str) -> None:
    with running(keys=("secret's",)) as served:
        window = opened(browser, served.url)
        window.context.grant_permissions(["clipboard-read", "clipboard-write"])
        with window as page:
            page.fill("#key", "secret's")
            page.keyboard.press("Enter")
            page.wait_for_function("document.getElementById('served').textContent.includes('p-eagle')")
            window.complaints.clear()
            if lane != "chat":
                page.click("#tab-race")
            page.fill("#question", QUESTION)
            page.click("#curl" if lane == "chat" else f"#curl-{lane}")
            page.wait_for_selector("text=Copied")
            command = page.evaluate("navigator.clipboard.readText()")
            is_drafted = lane != "plain"

            def is_it(request: Any) -> bool:
                body = request.url.endswith(CHAT) and request.post_data_json
                return body and body["max_tokens"] > 1 and body["speculation"]["enabled"] is is_drafted

            with page.expect_request_finished(is_it) as sent:
                page.click("#send")
            request = sent.value
            words = shlex.split(command)
            assert words[0] == "curl" and request.url in words
            assert words[words.index("-d") + 1] == request.post_data
            given = {words[n + 1] for n, word in enumerate(words) if word == "-H"}
            assert given == {"Content-Type: application/json", "Authorization: Bearer secret's"}
            page.wait_for_function(STOPPED)
            said = page.inner_text(".message.assistant" if lane == "chat" else f"#answer-{lane}")
            answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
            events = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
            text = "".join(each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"])
            assert text.split() and text.split() == said.removesuffix("reached the maximum length").split()


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

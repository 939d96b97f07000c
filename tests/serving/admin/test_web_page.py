"""The page at `/` in a real browser: live statistics, a chat that streams and stops, safe text."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from cluster.serving.admin.web_page import PAGE_PATHS
from cluster.serving.reasoning.formats import reasoning_of
from tests.serving.admin.chromium import CHROMIUM, Browser
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.serving.conftest import Server
    from tests.serving.fake_engine import FakeEngine

ATTACK = "<img src=x onerror=document.title=1>"
ANSWER = "(document.querySelector('.message.assistant:last-child .text')?.textContent ?? '')"
IS_DONE = "document.querySelector('.message.assistant:last-child .note') !== null"

with_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Browser]:
    """The page, ready, in a desktop's window."""
    browser.console.clear()
    browser.look(width=1200, height=800)
    browser.open(server.url)
    browser.wait_for("document.getElementById('status').textContent === 'Ready'")
    yield browser
    # An open page would poll during the next test.
    browser.open("data:text/html,")


def say(page: Browser, text: str) -> None:
    page.write("#text", text)
    page.press("Enter")


def speak(server: Server, engine: FakeEngine, text: str) -> None:
    """Have the model generate this text repeatedly."""
    token_ids = server.tokenizer.encode(text, add_special_tokens=False)
    engine.script = lambda request, index: token_ids


@with_chromium
def test_chat_streams_a_response(page: Browser, server: Server, engine: FakeEngine) -> None:
    engine.step_s = 0.05
    speak(server, engine, "word ")
    page.evaluate("document.getElementById('max-tokens').value = 40")
    say(page, "hello")
    # Part of the response is shown while the rest is streamed.
    page.wait_for(f"{ANSWER}.length > 5 && !({IS_DONE})")
    page.wait_for(IS_DONE)
    note = page.evaluate("document.querySelector('.message.assistant .note').textContent")
    assert re.fullmatch(
        r"40 tokens in [\d.]+ s, first after [\d.]+ m?s, [\d.]+ tokens/s; cut off at the .*",
        note,
    )
    assert page.evaluate(ANSWER).startswith("word word")
    assert engine.log.submitted[0].sampling.max_tokens == 40
    assert page.console == []


@with_chromium
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_aborts_the_request(page: Browser, engine: FakeEngine, how: str) -> None:
    engine.step_s = 0.05
    say(page, "hello")
    page.wait_for(f"{ANSWER}.length > 0")
    if how == "button":
        page.click("#stop")
    else:
        page.press("Escape")
    page.wait_for(IS_DONE)
    assert page.evaluate("document.querySelector('.note').textContent") == "Stopped."
    page.wait_for("!document.getElementById('send').hidden")
    asyncio.run(wait_until(lambda: engine.num_sequences == 0))


@with_chromium
def test_conversation_continues(page: Browser, server: Server, engine: FakeEngine) -> None:
    speak(server, engine, "yes ")
    page.evaluate("document.getElementById('max-tokens').value = 4")
    for number, text in enumerate(("one", "two"), start=1):
        say(page, text)
        page.wait_for(f"document.querySelectorAll('.note').length === {number}")
    second = server.tokenizer.decode(engine.log.submitted[1].prompt_token_ids)
    assert re.search("one.*yes.*two", second, re.DOTALL)
    page.click("#new-chat")
    assert page.evaluate("document.querySelectorAll('.message').length") == 0


@with_chromium
def test_another_answer_takes_the_place_of_the_last(
    page: Browser, server: Server, engine: FakeEngine
) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 4")
    for number, word in enumerate(("yes ", "no "), start=1):
        speak(server, engine, word)
        if number == 1:
            say(page, "one")
        else:
            page.click("#again")
        page.wait_for(f"{ANSWER}.startsWith('{word}') && ({IS_DONE})")
        assert page.evaluate("document.querySelectorAll('.message').length") == 2
    first, second = engine.log.submitted
    assert first.prompt_token_ids == second.prompt_token_ids


@with_chromium
def test_conversations_are_kept_in_the_browser(
    page: Browser, server: Server, engine: FakeEngine
) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 2")
    page.evaluate("document.getElementById('key').value = 'secret'")
    page.evaluate("localStorage.clear()")
    for text in (f"one {ATTACK}", "two"):
        say(page, text)
        page.wait_for(IS_DONE)
        page.click("#new-chat")
    stored = page.evaluate("localStorage.getItem('pagedray.chats')")
    assert "one" in stored
    assert "secret" not in stored
    page.open(server.url)
    page.wait_for("document.getElementById('status').textContent === 'Ready'")
    page.click("#history-button")
    titles = page.evaluate(
        "[...document.querySelectorAll('#chats button')].map((one) => one.textContent)"
    )
    assert titles == ["two", f"one {ATTACK}"]
    page.click("#chats li:last-child button")
    page.wait_for("document.querySelectorAll('.message').length === 2")
    page.evaluate("document.getElementById('max-tokens').value = 2")
    say(page, "three")
    page.wait_for(IS_DONE)
    prompt = server.tokenizer.decode(engine.log.submitted[-1].prompt_token_ids)
    assert prompt.index("one") < prompt.index("three")
    page.click("#history-button")
    page.click("#forget")
    assert page.evaluate("document.querySelectorAll('#chats button').length") == 0
    assert page.console == []


@with_chromium
def test_the_last_message_can_be_edited(page: Browser, engine: FakeEngine) -> None:
    page.evaluate("document.getElementById('max-tokens').value = 2")
    say(page, "first words")
    page.wait_for(IS_DONE)
    page.click("#edit")
    assert page.evaluate("document.getElementById('text').value") == "first words"
    assert page.evaluate("document.querySelectorAll('.message').length") == 0
    page.press("Enter")
    page.wait_for(IS_DONE)
    first, second = engine.log.submitted
    assert first.prompt_token_ids == second.prompt_token_ids


@with_chromium
def test_settings_are_sent_and_empty_ones_are_not(page: Browser, engine: FakeEngine) -> None:
    values = {"top-p": 0.5, "top-k": 7, "seed": 3, "presence-penalty": 0.5, "max-tokens": 2}
    for name, value in values.items():
        page.evaluate(f"document.getElementById('{name}').value = {value}")
    page.evaluate("document.getElementById('stop-text').value = 'zz'")
    say(page, "hello")
    page.wait_for(IS_DONE)
    sampling = engine.log.submitted[0].sampling
    assert (sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 7, 3)
    assert (sampling.presence_penalty, tuple(sampling.stop)) == (0.5, ("zz",))
    assert (sampling.min_p, sampling.repetition_penalty, sampling.frequency_penalty) == (0, 1, 0)


@with_chromium
def test_code_has_a_button_that_copies_it(
    page: Browser, server: Server, engine: FakeEngine
) -> None:
    text = "a\n```\nx = 1\n```\n"
    speak(server, engine, text)
    num_tokens = len(server.tokenizer.encode(text, add_special_tokens=False))
    page.evaluate(f"document.getElementById('max-tokens').value = {num_tokens}")
    # The page may not write to the clipboard of the machine that tests it.
    page.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    say(page, "hello")
    page.wait_for(IS_DONE)
    page.wait_for("document.querySelector('.message .copy') !== null")
    page.click(".message .copy")
    page.wait_for("document.querySelector('.copy').textContent === 'Copied'")
    assert page.evaluate("window.copied") == "x = 1"


@with_chromium
def test_reasoning_is_folded(page: Browser, server: Server, engine: FakeEngine) -> None:
    validator = server.frontends.servicer.validator
    validator.reasoning = reasoning_of("deepseek_r1", server.tokenizer)
    try:
        speak(server, engine, f"{ATTACK} so</think>yes ")
        page.evaluate("document.getElementById('max-tokens').value = 60")
        say(page, "one")
        page.wait_for(IS_DONE)
    finally:
        validator.reasoning = None
    assert page.evaluate(ANSWER).startswith("yes ")
    details = "document.querySelector('.message.assistant details')"
    assert page.evaluate(f"{details}.open") is False
    assert page.evaluate(f"{details}.textContent") == f"Reasoning{ATTACK} so"
    assert page.console == []


@with_chromium
def test_text_of_users_and_models_stays_text(
    page: Browser, server: Server, engine: FakeEngine
) -> None:
    text = f"{ATTACK}\n```\n{ATTACK}\n```\n`{ATTACK}`"
    speak(server, engine, text)
    num_tokens = len(server.tokenizer.encode(text, add_special_tokens=False))
    page.evaluate(f"document.getElementById('max-tokens').value = {num_tokens}")
    say(page, ATTACK)
    page.wait_for(IS_DONE)
    messages = "document.getElementById('messages')"
    assert page.evaluate(f"{messages}.querySelectorAll('img, script').length") == 0
    assert page.evaluate(f"{messages}.textContent").count("<img src=x") == 4
    assert page.evaluate(f"{messages}.querySelector('pre code').textContent") == ATTACK
    assert page.evaluate("document.title") == "tiny - PagedRay"
    assert page.console == []


@with_chromium
def test_error_is_shown_and_the_text_is_kept(page: Browser) -> None:
    text = "too long " * 400
    say(page, text)
    page.wait_for("document.querySelector('.problem') !== null")
    assert "tokens" in page.evaluate("document.querySelector('.problem').textContent")
    assert page.evaluate("document.getElementById('text').value") == text.strip()


@with_chromium
def test_statistics_are_live(page: Browser, engine: FakeEngine) -> None:
    # The fake engine has 60 of 64 device blocks free.
    assert page.evaluate("document.getElementById('device-text').textContent") == "4 of 64"
    engine.step_s = 0.05
    say(page, "hello")
    page.wait_for("document.getElementById('running').textContent === '1'")
    page.wait_for("document.querySelectorAll('#calls-body tr').length === 1")
    page.press("Escape")
    page.wait_for("document.getElementById('running').textContent === '0'")


@with_chromium
@pytest.mark.parametrize("width", [360, 1200])
def test_page_fits_its_window(page: Browser, width: int) -> None:
    page.look(width=width, height=740)
    say(page, "x" * 150)
    page.wait_for(IS_DONE)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    send = page.evaluate("document.getElementById('send').getBoundingClientRect().bottom")
    assert send <= 740


@with_chromium
def test_controls_have_names_and_are_reached_by_keyboard(page: Browser) -> None:
    tree = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [
        node
        for node in tree
        if node.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "meter")
    ]
    assert len(controls) >= 6
    assert [node for node in controls if not node["name"]["value"]] == []
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(12):
        page.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"settings-button", "new-chat", "text", "send"} <= reached


def test_security_policy_allows_the_page_only(http: httpx.Client) -> None:
    for path in PAGE_PATHS:
        answer = http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        unchanged = http.get(path, headers={"if-none-match": answer.headers["etag"]})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
    text = http.get("/").text
    assert re.findall(r"(?:https?:)?//[\w.]+", text) == []
    assert re.findall(r"<script(?![^>]*src)|style=|\son\w+=", text) == []

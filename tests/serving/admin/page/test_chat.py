"""A chat on the page: it streams, stops, continues, and can be changed."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import pytest

from cluster.serving.reasoning import reasoning_of
from pagedray.errors import EngineError
from tests.serving.admin.page.chat_page import ChatPage
from tests.serving.conftest import Server, wait_until

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.admin.page.chromium import Browser
    from tests.serving.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

ATTACK = "<img src=x onerror=document.title=1>"
# Cuts the next connections of chats, each after some reads, and then answers with a status.
CUT = """
(({ numCuts, numReads, then }) => {
  const real = window.fetch;
  let left = numCuts;
  window.fetch = async (path, options) => {
    if (!path.endsWith('completions')) return real(path, options);
    left -= 1;
    if (left < 0) {
      if (then === 0) throw new TypeError('network error');
      return then ? new Response(null, { status: then }) : real(path, options);
    }
    const { status, headers, body } = await real(path, options);
    const reader = body.getReader();
    let readsLeft = numReads;
    return new Response(new ReadableStream({
      async pull(stream) {
        readsLeft -= 1;
        if (readsLeft < 0) {
          reader.cancel();
          stream.error(new TypeError('network error'));
          return;
        }
        const { value, done } = await reader.read();
        if (done) stream.close();
        else stream.enqueue(value);
      },
    }), { status, headers });
  };
})(%s)
"""
SHORT_PAUSES = "{ const set = setTimeout; window.setTimeout = (f, ms) => set(f, ms / 50); }"


def test_answer_is_shown_while_it_is_streamed(page: ChatPage, engine: FakeEngine) -> None:
    engine.step_s = 0.05
    page.set(max_completion_tokens=40)
    page.say("hello")
    page.wait_for("document.querySelector('.markdown p')?.textContent.length > 5")
    assert page.count(".timing") == 0
    page.wait_for("document.querySelector('.timing') !== null")
    assert re.fullmatch(
        r"[\d.]+ tokens/s \u00b7 first token [\d.]+ m?s \u00b7 40 tokens in [\d.]+ m?s \u00b7 "
        "cut off at the token limit",
        page.text(".timing"),
    )
    assert engine.log.submitted[0].sampling.max_tokens == 40
    assert page.console == []


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_aborts_the_request(page: ChatPage, engine: FakeEngine, how: str) -> None:
    engine.step_s = 0.05
    page.say("hello")
    page.wait_for("document.querySelector('.markdown p')?.textContent.length > 0")
    if how == "button":
        page.browser.click("#stop")
    else:
        page.browser.press("Escape")
    page.wait_for("!document.getElementById('send').hidden")
    assert page.text(".timing").endswith("stopped")
    asyncio.run(wait_until(lambda: engine.num_sequences == 0))


@pytest.mark.parametrize("cut", ["numReads: 0", "numReads: 3", "numReads: 3, then: 503"])
def test_stream_that_is_cut_goes_on(page: ChatPage, engine: FakeEngine, cut: str) -> None:
    engine.step_s = 0.02
    page.speak("a b c d e f g h i j k l m n")
    if "503" in cut:
        page.evaluate(
            "{ const real = window.fetch; setTimeout(() => { window.fetch = real; }, 1500); }"
        )
    page.evaluate(CUT % f"{{ numCuts: 2, {cut} }}")
    page.ask("hello")
    assert page.text(".markdown") == "a b c d e f g h i j k l m n"
    assert len(engine.log.submitted) == 1
    assert "interrupted" not in page.text(".timing")
    assert page.count(".message :is(.problem, .reconnecting)") == 0


@pytest.mark.parametrize("then", [0, 404])
def test_stream_that_cannot_go_on_is_interrupted(
    page: ChatPage, engine: FakeEngine, then: int
) -> None:
    engine.step_s = 0.05
    page.evaluate(SHORT_PAUSES)
    page.evaluate(CUT % f"{{ numCuts: 1, numReads: 3, then: {then} }}")
    page.say("hello")
    page.wait_for("document.querySelector('.message .problem') !== null")
    assert page.text(".message .problem p") == (
        "The connection to the server was lost; the answer is incomplete."
    )
    assert page.text(".timing").endswith("interrupted")
    # The server goes on.
    engine.step_s = 0.0


def test_stream_is_not_resumed_where_the_server_cannot(
    browser: Browser, tokenizer: Tokenizer
) -> None:
    with Server(tokenizer) as server, ChatPage(browser, server) as page:
        page.speak("yes")
        page.ask("one")
        page.ask("two")
        assert page.texts(".markdown") == ["yes", "yes"]
        assert len(server.engine.log.submitted) == 2
        server.engine.step_s = 0.05
        page.speak("a longer answer")
        page.evaluate(CUT % "{ numCuts: 1, numReads: 1 }")
        page.say("hello")
        page.wait_for("document.querySelector('.message .problem') !== null")
        assert page.texts(".timing")[-1].endswith("interrupted")


def test_conversation_continues(page: ChatPage) -> None:
    page.speak("yes")
    page.ask("one")
    page.ask("two")
    assert re.search("one.*yes.*two", page.prompt(), re.DOTALL)
    page.click("#new-chat")
    assert page.count(".message") == 0


def test_another_answer_takes_the_place_of_one(page: ChatPage) -> None:
    for word in ("first", "second"):
        page.speak(word)
        page.ask(f"say {word}")
    page.speak("other")
    page.click(".message.assistant .regenerate")
    page.wait_for("document.querySelector('.markdown')?.textContent === 'other'")
    page.wait_for("document.querySelectorAll('.timing').length === 1")
    # What followed was about the answer that is gone.
    assert page.texts(".bubble") == ["say first"]
    assert page.prompt() == page.prompt(0)


def test_a_message_can_be_edited(page: ChatPage) -> None:
    page.speak("yes")
    page.ask("one")
    page.ask("two")
    page.click(".message.user .edit")
    page.evaluate("document.querySelector('.edit-form textarea').value = 'three'")
    page.click(".edit-form .strong")
    page.wait_for("document.querySelectorAll('.timing').length === 1")
    assert page.texts(".bubble") == ["three"]
    assert "three" in page.prompt()
    assert "one" not in page.prompt()


def test_answer_to_a_conversation_that_was_left_does_not_show(
    page: ChatPage, engine: FakeEngine
) -> None:
    engine.step_s = 0.05
    page.say("hello")
    page.wait_for("document.querySelector('.markdown p')?.textContent.length > 0")
    page.click("#new-chat")
    asyncio.run(wait_until(lambda: engine.num_sequences == 0))
    assert page.count(".message") == 0
    # It is in the history, as far as it came.
    page.wait_for("document.querySelectorAll('#chats li').length === 1")


def test_conversations_are_kept_in_the_browser(page: ChatPage) -> None:
    page.speak("yes")
    for text in (f"one {ATTACK}", "two"):
        page.ask(text)
        page.click("#new-chat")
    page.load()
    assert page.texts("#chats .title") == ["two", f"one {ATTACK}"]
    page.click("#chats li:last-child .open")
    assert page.count(".message") == 2
    page.wait_for("document.querySelector('.timing') !== null")
    page.ask("three")
    assert page.prompt().index("one") < page.prompt().index("three")
    page.click("#chats li:last-child .remove")
    assert page.count("#chats li") == 1
    page.evaluate("window.confirm = () => true")
    page.click("#forget")
    assert page.count("#chats li") == 0
    assert page.evaluate("localStorage.getItem('pagedray.chats')") == "[]"
    assert page.console == []


def test_history_is_bounded(page: ChatPage) -> None:
    page.evaluate(
        "localStorage.setItem('pagedray.chats', JSON.stringify(Array.from({length: 60}, (_, at) =>"
        " ({id: String(at), messages: [{role: 'user', content: 'x'.repeat(30000)}]}))))"
    )
    page.speak("yes")
    page.ask("latest")
    stored = "JSON.parse(localStorage.getItem('pagedray.chats'))"
    assert page.evaluate(f"{stored}[0].messages[0].content") == "latest"
    assert page.evaluate("localStorage.getItem('pagedray.chats').length") <= 1_000_000
    # As many as fit.
    assert page.evaluate(f"{stored}.length") == 34


def test_a_conversation_that_is_too_long_leaves_the_others(page: ChatPage) -> None:
    page.evaluate(
        "localStorage.setItem('pagedray.chats', JSON.stringify("
        "[{id: 'a', messages: [{role: 'user', content: 'x'.repeat(1_000_000)}]},"
        " {id: 'b', messages: [{role: 'user', content: 'short'}]}]))"
    )
    page.load()
    page.evaluate(
        "import('/page/chat/history.js').then(({History: Kept}) => {"
        " const kept = new Kept(); kept.save(kept.chats[0]); })"
    )
    page.wait_for("JSON.parse(localStorage.getItem('pagedray.chats')).length === 1")
    assert "short" in page.evaluate("localStorage.getItem('pagedray.chats')")


def test_what_else_is_stored_breaks_nothing(page: ChatPage) -> None:
    page.evaluate("localStorage.setItem('pagedray.chats', '[1, {}, {\"messages\": [null]}]')")
    page.evaluate("localStorage.setItem('pagedray.settings', '[')")
    page.load()
    assert page.count("#chats li") == 0
    assert page.console == []


def test_reasoning_is_folded(page: ChatPage, server: Server) -> None:
    validator = server.frontends.servicer.validator
    validator.reasoning = reasoning_of("deepseek_r1", server.tokenizer)
    try:
        page.speak(f"{ATTACK} so</think>yes")
        page.ask("one")
    finally:
        validator.reasoning = None
    assert page.text(".markdown") == "yes"
    assert page.evaluate("document.querySelector('.reasoning').open") is False
    assert page.text(".reasoning p") == f"{ATTACK} so"
    assert page.text(".reasoning summary").startswith("Reasoned for ")
    assert page.console == []


FIELD = "document.getElementById('text').value"


def test_failed_message_returns_to_its_field(page: ChatPage) -> None:
    text = "too long " * 400
    for is_retry in (False, True):
        page.click(".retry") if is_retry else page.say(text)
        page.wait_for("document.querySelector('.message .problem') !== null")
        assert "tokens" in page.text(".message .problem")
        assert page.evaluate(FIELD) == text.strip()
    # A message without an answer gives way to the next one.
    page.speak("yes")
    page.evaluate(f"{FIELD} = ''")
    page.ask("short")
    assert page.texts(".bubble") == ["short"]
    assert page.count(".problem .retry") == 0
    assert page.evaluate(FIELD) == ""


@pytest.mark.parametrize("how", ["stopped", "invalid", "failed"])
def test_message_without_an_answer_is_put_before_a_draft(
    page: ChatPage, engine: FakeEngine, how: str
) -> None:
    engine.is_paused = True
    if how == "invalid":
        page.set(tools="[")
    elif how == "failed":
        engine.rejection = EngineError("A rank died.")
    page.say("first")
    page.browser.write("#text", "draft")
    if how == "stopped":
        page.browser.press("Escape")
    page.wait_for(f"{FIELD}.startsWith('first') && !document.getElementById('send').hidden")
    assert page.evaluate(FIELD).split("\n") in (["first", "draft"], ["firstdraft"])
    assert page.texts(".bubble") == ["first"]

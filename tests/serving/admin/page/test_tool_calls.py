"""Calls of tools on the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from cluster.serving.intake import ReaderLimits
from tests.serving.admin.page.chat_page import ChatPage
from tests.serving.conftest import Server
from tests.serving.openai.test_tools import AUTO, TEMPLATE, TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.admin.page.chromium import Browser

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tool_server(template_tokenizer: Callable[..., Tokenizer]) -> Iterator[Server]:
    limits = ReaderLimits(resume_grace_s=3600.0)
    with Server(template_tokenizer(TEMPLATE), context=2048, reader_limits=limits) as server:
        yield server


def test_calls_are_shown_and_their_results_are_sent(browser: Browser, tool_server: Server) -> None:
    with ChatPage(browser, tool_server) as page:
        page.set(tools=json.dumps(TOOLS))
        page.speak(AUTO)
        page.ask("How is it?")
        assert page.text(".markdown") == "I ask."
        assert page.texts(".tool h3 strong") == ["weather", "time"]
        assert json.loads(page.text(".tool pre code")) == {"city": "K\u00f6ln \U0001f642"}
        page.evaluate("document.querySelectorAll('.tool textarea')[0].value = 'sunny <b>'")
        page.evaluate("document.querySelectorAll('.tool textarea')[1].value = 'noon'")
        page.speak("It is sunny.")
        page.click(".send-results")
        page.wait_for("document.querySelectorAll('.timing').length === 2")
        prompt = page.prompt()
        assert prompt.index("weather") < prompt.index("sunny <b>") < prompt.index("noon")
        assert page.texts(".tool details p") == ["sunny <b>", "noon"]
        # The history has them too.
        page.load()
        page.click("#chats .open")
        assert page.texts(".tool details p") == ["sunny <b>", "noon"]
        assert page.count(".tool textarea") == 0
        assert page.console == []


def test_calls_without_results_ask_again_when_they_are_opened(
    browser: Browser, tool_server: Server
) -> None:
    with ChatPage(browser, tool_server) as page:
        page.set(tools=json.dumps(TOOLS))
        page.speak(AUTO)
        page.ask("How is it?")
        page.load()
        page.click("#chats .open")
        assert page.count(".tool textarea") == 2


def test_an_answer_that_is_drawn_late_asks_for_no_results_of_another_chat(
    browser: Browser, tool_server: Server
) -> None:
    hold = (
        "import('/page/markdown/lexer.js').then(({ lexer }) => {"
        " const held = []; const lex = lexer.ask.bind(lexer);"
        " lexer.ask = async (text) => { await new Promise((wake) => held.push(wake));"
        " return lex(text); };"
        " window.release = () => { lexer.ask = lex; held.forEach((wake) => wake()); }; })"
    )
    with ChatPage(browser, tool_server) as page:
        page.set(tools=json.dumps(TOOLS))
        page.speak(AUTO)
        page.ask("How is it?")
        page.click("#new-chat")
        page.evaluate(hold)
        page.say("How is it now?")
        received = "document.querySelectorAll('.tool').length === 2"
        page.wait_for(f"{received} && document.querySelector('.running') === null")
        page.click("#chats .open")
        page.evaluate("window.release()")
        page.wait_for("document.querySelectorAll('.timing').length === 1")
        page.wait_for("document.querySelector('.send-results') !== null")
        # Another button would follow.
        page.evaluate("new Promise((wake) => setTimeout(wake, 100))")
        assert page.count(".tool textarea") == 2
        assert page.count(".send-results") == 1

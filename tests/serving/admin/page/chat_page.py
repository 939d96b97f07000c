"""What tests do with the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from tests.serving.admin.page.chromium import Browser
    from tests.serving.conftest import Server

__all__ = ["ChatPage"]

# The page gives up parsing after a few seconds, which a busy machine may take for any text.
_PATIENT = """
(() => {
  const set = window.setTimeout;
  window.setTimeout = (call, ms, ...rest) => set(call, ms >= 3000 ? 20 * ms : ms, ...rest);
})()
"""
ANSWER = "document.querySelector('.message.assistant:last-child')"


class ChatPage:
    """The page of a server in a tab. A context manager."""

    def __init__(self, browser: Browser, server: Server) -> None:
        self.browser = browser
        self._server = server

    def __enter__(self) -> Self:
        self.browser.console.clear()
        self.browser.look(width=1200, height=800)
        self.browser.send(
            "Storage.clearDataForOrigin", origin=self._server.url, storageTypes="local_storage"
        )
        self.load()
        return self

    def __exit__(self, *_: object) -> None:
        # An open page would poll during the next test.
        self.browser.open("data:text/html,")

    def load(self, *, keeps_limits: bool = False) -> None:
        """Open the page and wait until the server is ready.

        Limits of seconds are twenty times as long unless the page `keeps_limits`.
        """
        self.browser.open(self._server.url)
        if not keeps_limits:
            self.evaluate(_PATIENT)
        self.wait_for("document.getElementById('status').textContent === 'Ready'")

    @property
    def console(self) -> list[str]:
        return self.browser.console

    def evaluate(self, expression: str) -> Any:  # Any: any JSON value
        return self.browser.evaluate(expression)

    def wait_for(self, expression: str) -> None:
        self.browser.wait_for(expression)

    def text(self, selector: str) -> str:
        """Return the text of the first element, or nothing."""
        found = self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")
        assert isinstance(found, str)
        return found

    def texts(self, selector: str) -> list[str]:
        """Return the texts of all elements."""
        found = self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((one) => one.textContent)"
        )
        assert isinstance(found, list)
        return found

    def count(self, selector: str) -> int:
        """Return the number of elements."""
        return len(self.texts(selector))

    def click(self, selector: str) -> None:
        """Click an element that need not be in view."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def set(self, **settings: str | float | bool) -> None:
        """Write settings into their fields, as a user would."""
        for name, value in settings.items():
            self.evaluate(
                "((name, value) => { const field = document.getElementsByName(name)[0];"
                " if (field.type === 'checkbox') field.checked = value; else field.value = value;"
                " field.dispatchEvent(new Event('input', {bubbles: true})); })"
                f"({json.dumps(name)}, {json.dumps(value)})"
            )

    def speak(self, text: str) -> None:
        """Have the model write this text, whole."""
        self._server.say(text)

    def say(self, text: str) -> None:
        """Write a message and send it."""
        self.browser.write("#text", text)
        self.browser.press("Enter")

    def ask(self, text: str) -> None:
        """Send a message and wait for the whole answer."""
        num_answers = self.count(".timing")
        self.say(text)
        self.wait_for(f"document.querySelectorAll('.timing').length > {num_answers}")

    def prompt(self, number: int = -1) -> str:
        """Return the prompt of a request that the engine got."""
        request = self._server.engine.log.submitted[number]
        return self._server.tokenizer.decode(request.prompt_token_ids)

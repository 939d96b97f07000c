"""A headless Chromium that tests drive over a pipe, in the DevTools protocol."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
_LAUNCHER = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_TIMEOUT_S = 60.0


class Browser:
    """One tab of a browser with its own profile."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        to_browser, self._write_end = os.pipe()
        self._read_end, from_browser = os.pipe()
        assert min(to_browser, from_browser) > 4
        # The protocol's pipes must be descriptors 3 and 4.
        launcher = (sys.executable, "-c", _LAUNCHER, str(to_browser), str(from_browser))
        self._process = subprocess.Popen(
            [*launcher, CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._num_sent = 0
        self._session: str | None = None
        self.console: list[str] = []
        """Errors, exceptions and policy violations of pages."""
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def _attach(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: object) -> dict[str, Any]:
        """Return the result of a command."""
        self._num_sent += 1
        message: dict[str, object] = {"id": self._num_sent, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_end, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.send("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:  # any JSON value
        """Return the JSON value of an expression in the page."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.send("Runtime.evaluate", **given, allowUnsafeEvalBlockedByCSP=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Return once an expression holds in the page."""
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline_s, f"{expression} did not happen: {self.console}"
            time.sleep(0.02)

    def write(self, selector: str, text: str) -> None:
        """Put the cursor into a field and type."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key that is not a character."""
        codes = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, "")}
        code, text = codes[key]
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.send("Input.dispatchKeyEvent", type="keyUp", **given)

    def click(self, selector: str) -> None:
        """Click with the mouse in the middle of an element."""
        found = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        box = self.evaluate(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({found})")
        where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    def look(self, *, width: int, height: int, scheme: str = "light") -> None:
        """Emulate a screen of this size and color scheme."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        os.close(self._write_end)
        os.close(self._read_end)
        # All processes of the browser are in the session that was started for it.
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._read_end, 1 << 16)
            assert read, "The browser has ended."
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event["method"] == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif event["method"] == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"]))

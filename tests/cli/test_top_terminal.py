"""`pagedray top` in a real terminal: a pseudo-terminal that an emulator reads."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from tests.cli.loads_server import HISTORY, LOADS, serving
from tests.cli.terminal_emulator import Terminal
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAVE_OWN_SCREEN = b"\x1b[?1049l"


@pytest.fixture
def url() -> Iterator[str]:
    history = msgspec.json.encode(HISTORY)
    with serving(msgspec.json.encode(LOADS), history=history) as (url, _):
        yield url


def test_it_fits_the_terminal_and_ends_with_q(url: str) -> None:
    with Terminal(["top", f"--url={url}", "--every-s=0.2"]) as terminal:

        def is_whole(text: str) -> bool:
            has_calls = "150 of 200" in text and "call-5" in text
            return has_calls and text.rstrip().endswith("╯")

        wait_for(lambda: is_whole(terminal.text))
        terminal.resize(60, 16)

        def is_smaller(text: str) -> bool:
            return text.count("│") >= 28 and "call-5" not in text and "150 of 200" in text

        wait_for(lambda: is_smaller(terminal.text))
        terminal.press(b"x")
        terminal.press(b"q")
        assert terminal.process.wait(60.0) == 0
        terminal.join()
        assert LEAVE_OWN_SCREEN in terminal.written


def test_it_is_readable_in_80_columns_without_colors(url: str) -> None:
    arguments = ["top", f"--url={url}"]
    with Terminal(arguments, columns=80, lines=24, variables={"NO_COLOR": "1"}) as terminal:
        for words in (
            *("first token, p95", "10 min ago", "▄▄▅▅", "6,000", "600.0 ms", "call-2"),
            *("between tokens   12.0 ms   20.0 ms  30.0 ms  34,000", "prefix hits 25.0%"),
        ):
            # It may be drawing at the moment.
            wait_for(lambda: words in terminal.text)  # noqa: B023
        assert {cell.fg for cell in terminal.cells} == {"default"}
        terminal.press(b"q")
        assert terminal.process.wait(60.0) == 0


def test_a_hanging_server_does_not_block_the_keyboard() -> None:
    is_released = threading.Event()
    with (
        serving(msgspec.json.encode(LOADS), until=is_released) as (url, _),
        Terminal(["top", f"--url={url}"], patience_s=3600.0) as terminal,
    ):
        try:
            wait_for(lambda: "Connecting" in terminal.text)
            terminal.press(b"q")
            assert terminal.process.wait(60.0) == 0
        finally:
            is_released.set()


def test_a_terminal_that_cannot_move_the_cursor_is_rejected() -> None:
    with Terminal(["top"], variables={"TERM": "dumb"}) as terminal:
        assert terminal.process.wait(60.0) == 2
        wait_for(lambda: "use --once" in terminal.text)


def test_an_unreachable_server_is_reported_and_ctrl_c_quits() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Terminal(["top", f"--url={url}", "--every-s=0.2"]) as terminal:
            wait_for(lambda: "Cannot reach the server" in terminal.text)
            terminal.press(b"\x03")
            assert terminal.process.wait(60.0) == 130
            assert "Traceback" not in terminal.text

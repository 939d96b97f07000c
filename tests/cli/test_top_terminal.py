"""`pagedray top` in a real terminal: a pseudo-terminal that an emulator reads."""

from __future__ import annotations

import fcntl
import os
import pty
import socket
import struct
import subprocess
import sys
import termios
import threading
from typing import TYPE_CHECKING

import msgspec
import pyte
import pytest

from tests.cli.loads_server import HISTORY, LOADS, serving
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

LEAVE_OWN_SCREEN = b"\x1b[?1049l"
# Ctrl-C sends SIGINT only from the controlling terminal.
PROGRAM = """
import fcntl, signal, sys, termios
from cluster.cli.__main__ import main
from cluster.cli.top import loads_client
loads_client._TIMEOUT_S = float(sys.argv.pop(1))
# The parent process may ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.exit(main())
"""


class Terminal:
    """A program in a terminal of its own."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        columns: int = 100,
        lines: int = 40,
        variables: Mapping[str, str] | None = None,
        patience_s: float = 5.0,
    ) -> None:
        """A server may take `patience_s` to respond."""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self.written = b""
        self._master, slave = pty.openpty()
        self._set_size(columns, lines)
        # These would take precedence over the terminal's size.
        fixed = ("COLUMNS", "LINES")
        environment = {name: value for name, value in os.environ.items() if name not in fixed}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(patience_s), *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**environment, "TERM": "xterm-256color", **(variables or {})},
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self.join()
        os.close(self._master)

    @property
    def text(self) -> str:
        with self._lock:
            return "\n".join(self._screen.display)

    @property
    def cells(self) -> tuple[pyte.screens.Char, ...]:
        with self._lock:
            return tuple(cell for line in self._screen.buffer.values() for cell in line.values())

    def join(self) -> None:
        """Wait until all output of the program is read."""
        self._reader.join()

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def resize(self, columns: int, lines: int) -> None:
        with self._lock:
            self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                written = os.read(self._master, 65536)
            except OSError:
                # Every process that had it open has ended.
                return
            self.written += written
            with self._lock:
                self._stream.feed(written)


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

"""A program in a terminal of its own: a pseudo-terminal that an emulator reads."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from typing import TYPE_CHECKING

import pyte

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Terminal"]

# Ctrl-C sends SIGINT only from the controlling terminal.
PROGRAM = """
import fcntl, signal, sys, termios
from cluster.cli.__main__ import main
from cluster.cli import server_connection
server_connection._TIMEOUT_S = float(sys.argv.pop(1))
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
        self._text: str | None = None
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

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.join()
        os.close(self._master)

    @property
    def text(self) -> str:
        with self._lock:
            if self._text is None:
                self._text = "\n".join(self._screen.display)
            return self._text

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
            self._text = None
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
                self._text = None

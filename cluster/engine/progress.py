"""Progress of long work on standard error."""

from __future__ import annotations

import sys
from typing import TextIO

__all__ = ["ProgressLine"]


class ProgressLine:
    """A line of progress; on a terminal it is rewritten in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = ""
        self._what = ""
        self._is_closed = False

    def report(self, what: str, fraction: float) -> None:
        """Show that `fraction` of `what`, 0 to 1, is done; a no-op after `close`."""
        if self._is_closed:
            return
        if not self._is_terminal:
            if what != self._what:
                self._stream.write(f"{what} ...\n")
                self._stream.flush()
            self._what = what
            return
        line = f"{what} ... {fraction:4.0%}" if fraction > 0.0 else f"{what} ..."
        if line == self._shown:
            return
        self._stream.write("\r" + line.ljust(len(self._shown)))
        self._stream.flush()
        self._shown = line

    def close(self) -> None:
        """Clear the line."""
        if self._is_terminal and self._shown:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._stream.flush()
        self._is_closed = True

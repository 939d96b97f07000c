"""Progress of long work on standard error."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.engine.executor import ReportProgress

__all__ = ["ProgressLine", "progress_reports"]

_LINE_PAUSE_S = 10.0


@contextmanager
def progress_reports(*, are_shown: bool) -> Iterator[ReportProgress]:
    """Yield a function that shows progress on standard error until the block ends, or nothing."""
    # Programs without a console have no standard error.
    if not are_shown or sys.stderr is None:
        yield _ignore_progress
        return
    line = ProgressLine()
    try:
        yield line.report
    finally:
        line.close()


class ProgressLine:
    """A line of progress; on a terminal it is rewritten in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._shown = ""
        self._what = ""
        self._written_s = 0.0
        self._is_closed = False

    def report(self, what: str, fraction: float) -> None:
        """Show that `fraction` of `what`, 0 to 1, is done; has no effect after `close`.

        A detail of `what` that changes often, such as a speed, follows `; `. Where lines stay, a
        line with only another detail is shown every ten seconds.
        """
        if self._is_closed:
            return
        what, _, detail = what.partition("; ")
        if not self._is_terminal:
            self._add_line(what, detail, fraction)
            return
        line = f"{what} ... {_shown(fraction, detail)}".rstrip()
        if line == self._shown:
            return
        self._write("\r" + line.ljust(len(self._shown)))
        self._shown = line

    def _add_line(self, what: str, detail: str, fraction: float) -> None:
        now_s = time.monotonic()
        if what != self._what:
            self._write(f"{what} ...\n")
        elif detail and now_s - self._written_s >= _LINE_PAUSE_S:
            self._write(f"{what} ... {_shown(fraction, detail).lstrip()}\n")
        else:
            return
        self._what = what
        self._written_s = now_s

    def close(self) -> None:
        """Clear the progress line."""
        if self._is_terminal and self._shown:
            self._write("\r" + " " * len(self._shown) + "\r")
        self._is_closed = True

    def _write(self, text: str) -> None:
        # The work does not depend on a full disk, or a closed terminal.
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


def _shown(fraction: float, detail: str) -> str:
    done = f"{fraction:4.0%}" if fraction > 0.0 else ""
    return f"{done}, {detail}" if done and detail else done or detail


def _ignore_progress(what: str, fraction: float) -> None:
    pass

"""Formats, limits and writes the lines of the log, as text or JSON.

A record is one line whatever it contains. A terminal or pipe that is not read does not block the
server: when the queue is full, lines are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import sys
import time
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener
from typing import TYPE_CHECKING, Literal, TextIO

from pagedray.errors import invalid_field
from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["IgnoredParameters", "LineLimit", "LineRate", "LogFormat", "logging_to"]

logger = logging.getLogger(__name__)

LogFormat = Literal["text", "json"]
_PACKAGES = ("attention", "cluster", "pagedray", "workers")
_MAX_WAITING_LINES = 10_000
_PLAIN = re.compile(r"[\w.:/+@-]+", re.ASCII)
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_INTERVAL_S = 60.0
_MAX_LINES = 20
_PERIOD_S = 1.0


@contextmanager
def logging_to(
    stream: TextIO | None = None, *, form: LogFormat = "text", level: str = "info"
) -> Iterator[None]:
    """Write the log to a stream, by default to standard error."""
    writer = logging.StreamHandler(sys.stderr if stream is None else stream)
    writer.setFormatter(JsonLines() if form == "json" else TextLines())
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_WAITING_LINES)
    handler = _Waiting(waiting)
    listener = QueueListener(waiting, writer)
    root, packages = logging.getLogger(), [logging.getLogger(name) for name in _PACKAGES]
    root.addHandler(handler)
    for package in packages:
        package.setLevel(_LEVELS[level])
    listener.start()
    try:
        yield
    finally:
        root.removeHandler(handler)
        for package in packages:
            package.setLevel(logging.NOTSET)
        listener.stop()


class _Waiting(QueueHandler):
    """Queues records for the writing thread."""

    def __init__(self, waiting: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(waiting)
        self._num_lost = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        # Format the message here, because its arguments may change; formatters also need the fields
        # and the trace.
        record.msg, record.args = record.getMessage(), None
        if self._num_lost:
            lost = pluralize(self._num_lost, "line")
            record.msg = f"{record.msg} (dropped {lost} before this one)"
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
            self._num_lost = 0
        except queue.Full:
            self._num_lost += 1


class TextLines(logging.Formatter):
    """Lines of time, level, message, and fields as name=value."""

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time_of(record), record.levelname, record.getMessage()]
        parts += [f"{name}={_quoted(value)}" for name, value in _fields_of(record).items()]
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        # Only a trace has several lines.
        *line, last = parts
        trace = record.exc_info is not None
        return "\n".join((_one_line(line), last)) if trace else _one_line(parts)


class JsonLines(logging.Formatter):
    """Lines of one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # ASCII only, so that line separators of any kind are escaped.
        return json.dumps(line, default=str)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    found: Mapping[str, object] = getattr(record, "fields", {})
    return found


def _time_of(record: logging.LogRecord) -> str:
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{whole}.{int(record.msecs):03d}Z"


def _quoted(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _one_line(parts: list[str]) -> str:
    line = " ".join(parts)
    if line.isprintable():
        return line
    # Escape characters that would begin a new line or move the cursor of a terminal.
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
    )


class LineLimit:
    """Allows a log line per minute, about all events since the last line."""

    def __init__(
        self, *, interval_s: float = _INTERVAL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = clock()
        self._num_events = 0

    def count_event(self) -> int:
        """Count an event; return the number to log, or 0 if there is to be no line yet."""
        self._num_events += 1
        now_s = self._clock()
        if now_s < self._next_s:
            return 0
        self._next_s = now_s + self._interval_s
        num_events, self._num_events = self._num_events, 0
        return num_events


class LineRate:
    """Allows 20 log lines at once, and one more each second."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()
        self._num_allowed = float(_MAX_LINES)
        self._num_omitted = 0

    def count_event(self) -> int | None:
        """Count an event; return how many had no line before it, or None if it has none either."""
        now_s = self._clock()
        allowed = self._num_allowed + (now_s - self._last_s) / _PERIOD_S
        self._last_s = now_s
        self._num_allowed = min(float(_MAX_LINES), allowed)
        if self._num_allowed < 1:
            self._num_omitted += 1
            return None
        self._num_allowed -= 1
        num_omitted, self._num_omitted = self._num_omitted, 0
        return num_omitted


class IgnoredParameters:
    """Counts ignored parameters, and logs each name once; or rejects them."""

    def __init__(self, count: Callable[[str], None], *, is_strict: bool) -> None:
        """`count` is called with each name; the names come from tables in the code."""
        self._count = count
        self._is_strict = is_strict
        self._logged: set[str] = set()

    def note(self, name: str) -> None:
        """Note a parameter that is ignored. Raises InvalidRequestError in strict mode."""
        if self._is_strict:
            raise invalid_field(
                name,
                "has no effect on this server, and --strict-parameters rejects such parameters.",
            )
        self._count(name)
        if name not in self._logged:
            self._logged.add(name)
            logger.info("Ignoring the parameter %s, which has no effect on this server.", name)

"""Selects the inputs that reach code which shorter ones do not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

__all__ = ["inputs_that_reach_more"]

_ROOT = Path(__file__).parents[3]
_FOLDERS = tuple(f"{_ROOT / name}/" for name in ("attention", "cluster", "pagedray", "workers"))

Line = tuple[str, int, int]
"""File, line, and the line before it."""


def inputs_that_reach_more(
    run: Callable[[bytes], None], inputs: Iterable[bytes]
) -> Iterator[bytes]:
    """Yield the inputs that pass from one line to another as no shorter one does, in order."""
    known: set[Line] = set()
    for one in sorted(set(inputs), key=lambda content: (len(content), content)):
        found = _reached(run, one)
        if not found <= known:
            known |= found
            yield one


def _reached(run: Callable[[bytes], None], content: bytes) -> set[Line]:
    found: set[Line] = set()
    last: dict[FrameType, int] = {}

    def trace(frame: FrameType, event: str, argument: object) -> object:
        name = frame.f_code.co_filename
        if not name.startswith(_FOLDERS):
            return None
        if event == "line":
            found.add((name, frame.f_lineno, last.get(frame, 0)))
            last[frame] = frame.f_lineno
        elif event == "return":
            last.pop(frame, None)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]  # a local trace function has the same form
    try:
        run(content)
    finally:
        sys.settrace(before)
    return found

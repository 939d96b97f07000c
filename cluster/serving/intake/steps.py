"""Work on the event loop that can pause: a generator that yields between its steps."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

__all__ = ["Steps", "finish"]

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""A generator that yields wherever it may pause, and returns its result."""


def finish(steps: Steps[Result]) -> Result:
    """Return the result of steps that are run without pauses."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: Result = end.value
        return result

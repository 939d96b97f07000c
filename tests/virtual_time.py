"""Tests in virtual time: the event loop does not wait for its timers, however busy the machine."""

from __future__ import annotations

import asyncio
import functools
import selectors
from collections.abc import Callable, Coroutine
from typing import ParamSpec

Given = ParamSpec("Given")


class _Selector(selectors.DefaultSelector):
    """Lets time pass instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0.0 if timeout else timeout)
        if timeout and not events:
            self.now_s += timeout
        return events


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _Selector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now_s


def in_virtual_time(
    test: Callable[Given, Coroutine[object, object, None]],
) -> Callable[Given, None]:
    """Run a test on an event loop of its own, whose time passes only while all tasks wait.

    Nothing of the test may depend on another thread or process.
    """

    @functools.wraps(test)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def pass_time(seconds: float) -> None:
    """Let the running event loop's timers see that time has passed, as work would."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, _Loop):
        loop.selector.now_s += seconds
    else:
        now = loop.time
        loop.time = lambda: now() + seconds  # type: ignore[method-assign]  # of this loop only

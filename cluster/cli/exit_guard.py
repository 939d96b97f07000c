"""Ends the process of a server that cannot stop by itself after its engine has ended.

A step thread that hangs may hold the engine's lock, for which the event loop waits as soon as a
client submits or aborts a request. This thread needs neither.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from cluster.engine.step_loop import StepLoop

__all__ = ["guard_exit"]

logger = logging.getLogger(__name__)

_LIMIT_S = 30.0
_POLL_S = 1.0
_EXIT_CODE = 1


def guard_exit(
    engine: StepLoop, loop: asyncio.AbstractEventLoop, *, limit_s: float = _LIMIT_S
) -> None:
    """Start a thread that ends the process if the loop hangs once the engine has ended.

    The process ends with exit code 1 after the loop has run nothing for `limit_s`.
    """
    threading.Thread(
        target=_guard, args=(engine, loop, limit_s), name="pagedray-exit-guard", daemon=True
    ).start()


def _guard(engine: StepLoop, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    while True:
        time.sleep(_POLL_S)
        if engine.error is None:
            continue
        has_run = threading.Event()
        try:
            loop.call_soon_threadsafe(has_run.set)
        except RuntimeError:
            # It has been closed: the server has stopped.
            return
        if not has_run.wait(limit_s) and not loop.is_closed():
            logger.critical(
                "The engine has ended (%s), and the server does not respond. Exiting.", engine.error
            )
            os._exit(_EXIT_CODE)

"""Waiting for conditions that other threads fulfill."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["wait_until"]


async def wait_until(condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    """Return once the condition holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "It did not happen in time."
        await asyncio.sleep(0.002)

"""Stops processes for some time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.chaos.faults.fault import Scene

__all__ = ["pause"]


async def pause(scene: Scene, processes: Iterable[psutil.Process], *, seconds: float) -> None:
    """Send SIGSTOP and later SIGCONT, except to those that another fault has hung."""
    stopped = list(processes)
    # Some may have ended, or end meanwhile.
    for process in stopped:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    await asyncio.sleep(seconds)
    for process in stopped:
        if process not in scene.hung:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

"""Waits until the GPU memory of a process that has died is free."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from pagedray.errors import StartupError
from workers.worker import release_gpu_memory

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["with_freed_memory"]

_TIMEOUT_S = 10.0
"""How long the driver may take to free the memory, from when it was first needed."""
_POLL_S = 0.1


# Any: the arguments of the function.
def with_freed_memory(function: Callable[..., object], *arguments: Any) -> None:
    """Call the function, again and again while memory that it needs is being freed."""
    deadline_s: float | None = None
    while True:
        try:
            function(*arguments)
            return
        except (torch.OutOfMemoryError, StartupError) as error:
            # A variable for the cause would outlive this block, and keep the allocations of its
            # frames.
            is_memory = isinstance(error.__cause__ or error, torch.OutOfMemoryError)
            # Loading a large model may take longer than the driver does.
            deadline_s = deadline_s or time.monotonic() + _TIMEOUT_S
            if not is_memory or time.monotonic() > deadline_s:
                raise
        release_gpu_memory()
        time.sleep(_POLL_S)

"""Captures of launches that are dropped: nothing runs, and no graph is kept."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["dropped_capture"]


@contextmanager
def dropped_capture(stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture the launches on a stream, and drop the capture: nothing runs.

    The capture has its own memory pool, since a pool is freed with the only capture that uses it.
    """
    # The graph would otherwise be instantiated.
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    # Libraries may run here for the first time, and allocate their memory.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
        yield

"""Texts that are to become vectors, and how far they are."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pagedray.batch import Pooling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cluster.scheduling.fair_queue import Share
    from pagedray.errors import PagedRayError

__all__ = ["EmbeddingJob", "EmbeddingRequest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """Validated texts that are to become vectors."""

    texts: tuple[tuple[int, ...], ...]
    """The token ids of each, at least one."""
    pooling: Pooling
    is_normalized: bool = True
    size: int
    """The first so many numbers of each vector."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of steps beside other tenants."""
    deadline_s: float | None = None
    """When it is given up, on the monotonic clock."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.texts))


class EmbeddingJob:
    """A request on its way: which of its texts are still to be computed."""

    __slots__ = ("answer", "has_started", "order", "request", "share", "undone", "vectors")

    def __init__(self, request: EmbeddingRequest, arrival: int, share: Share[EmbeddingJob]) -> None:
        self.request = request
        self.order = (arrival,)
        self.share = share
        self.answer: Future[NDArray[np.float32]] = Future()
        self.vectors = np.zeros((len(request.texts), request.size), dtype=np.float32)
        # Texts of equal length stand side by side, for those are computed as one.
        texts = request.texts
        self.undone = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        self.has_started = False

    @property
    def kind(self) -> tuple[Pooling, bool]:
        """What the texts of one step have in common."""
        return self.request.pooling, self.request.is_normalized

    def resolve(self, error: PagedRayError | None) -> None:
        """Answer, unless nobody waits any more."""
        if not self.answer.set_running_or_notify_cancel():
            return
        if error is None:
            self.answer.set_result(self.vectors)
        else:
            self.answer.set_exception(error)

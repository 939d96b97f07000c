"""Requests to embed texts, and their progress."""

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
    """A validated request to embed texts."""

    texts: tuple[tuple[int, ...], ...]
    """Token ids by text, at least one id per text."""
    pooling: Pooling
    is_normalized: bool = True
    size: int
    """Number of leading elements of each vector to return."""
    num_first_type: tuple[int, ...] = ()
    """The tokens of type 0 of each pair of texts, as in `EmbedPlan`."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share of the engine, relative to other tenants."""
    deadline_s: float | None = None
    """When the request is aborted, on the monotonic clock."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all texts together."""
        return sum(map(len, self.texts))


class EmbeddingJob:
    """An open request and the texts of it that are not embedded yet."""

    __slots__ = (
        "answer",
        "has_started",
        "id",
        "is_quarantined",
        "num_steps",
        "order",
        "request",
        "share",
        "undone",
        "vectors",
    )

    def __init__(self, request: EmbeddingRequest, arrival: int, share: Share[EmbeddingJob]) -> None:
        self.request = request
        self.id = str(arrival)
        self.order = (arrival,)
        self.share = share
        self.answer: Future[NDArray[np.float32]] = Future()
        self.vectors = np.zeros((len(request.texts), request.size), dtype=np.float32)
        # Sorted by length, since texts of equal length are computed together.
        texts = request.texts
        self.undone = sorted(range(len(texts)), key=lambda i: len(texts[i]), reverse=True)
        self.has_started = False
        self.num_steps = 0
        """Steps that embedded some of its texts."""
        self.is_quarantined = False
        """Whether it may not run at present."""

    @property
    def kind(self) -> tuple[Pooling, bool]:
        """The parameters that all texts of a step share."""
        return self.request.pooling, self.request.is_normalized

    def put_back(self, index: int) -> None:
        """Return a text to the texts that are not embedded yet."""
        self.undone.append(index)
        self.undone.sort(key=lambda i: len(self.request.texts[i]), reverse=True)

    def resolve(self, error: PagedRayError | None) -> None:
        """Set the result, unless it was cancelled."""
        if not self.answer.set_running_or_notify_cancel():
            return
        if error is None:
            self.answer.set_result(self.vectors)
        else:
            self.answer.set_exception(error)

"""The interface between frontends and an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy as np
    from numpy.typing import NDArray

    from cluster.engine.embedding_scheduler import EmbeddingRequest
    from cluster.engine.stats import EngineStats
    from pagedray.errors import EngineError
    from pagedray.request import Request

__all__ = ["EmbeddingEngine", "Engine", "GenerationEngine"]


class Engine(Protocol):
    """The interface of any engine to the frontends; thread-safe."""

    def check_room(self, tenant: str, num_tokens: int) -> None:
        """Raise OverloadedError if the queue has no room for this many more prompt tokens."""

    def stats(self) -> EngineStats:
        """Return the current counts."""
        ...

    @property
    def is_healthy(self) -> bool:
        """Whether requests are accepted and steps run."""
        ...

    @property
    def error(self) -> EngineError | None:
        """The error that ended the engine permanently, if any."""
        ...


class EmbeddingEngine(Engine, Protocol):
    """An engine of a model that embeds."""

    def submit_texts(self, texts: EmbeddingRequest) -> Future[NDArray[np.float32]]:
        """Accept a request. Raises OverloadedError or EngineError."""
        ...


class GenerationEngine(Engine, Protocol):
    """An engine of a model that generates."""

    def submit_request(self, request: Request) -> None:
        """Accept a request. Raises CapacityError, OverloadedError or EngineError."""

    def abort_request(self, request_id: str) -> None:
        """End a request; ignore an unknown or ended request."""

    def finish_sequence(self, request_id: str, index: int) -> None:
        """End one sequence of a request, without an event for it."""

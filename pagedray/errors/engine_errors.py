"""Errors of an engine that is not available, and of its ranks."""

from __future__ import annotations

from pagedray.errors.base import PagedRayError

__all__ = ["EngineError", "HungRankError", "ShuttingDownError", "WorkerError"]


class EngineError(PagedRayError):
    """The engine is not available; another replica may be."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    grpc_reason = "ENGINE_UNAVAILABLE"
    outcome = "unavailable"
    retry_after_s = 1.0
    """When the client may try again: this replica may be back soon, or another one is chosen."""


class WorkerError(EngineError):
    """A rank failed or died, which ends its group."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        """What the log has in addition to the message, such as the rank's traceback."""


class HungRankError(WorkerError):
    """A rank makes no progress."""


class ShuttingDownError(EngineError):
    """The engine is shutting down and accepts no new requests."""

    grpc_reason = "SHUTTING_DOWN"
    outcome = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down and accepts no new requests.")

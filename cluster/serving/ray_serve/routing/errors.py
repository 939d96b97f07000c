"""The error of a client after its replica has died, the same from both of Ray Serve's proxies."""

from __future__ import annotations

from pagedray.errors import EngineError

__all__ = ["ReplicaDiedError"]


class ReplicaDiedError(EngineError):
    """The replica died while it served the request."""

    def __init__(self) -> None:
        super().__init__("The replica that served the request died; retry the request.")

"""The base class of errors, and the error for a defect."""

from __future__ import annotations

from typing import ClassVar

__all__ = ["InternalError", "PagedRayError"]


class PagedRayError(Exception):
    """Base class of all errors that this project raises deliberately."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    grpc_reason: ClassVar[str] = "INTERNAL"
    """The reason in google.rpc.ErrorInfo."""
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str | None] = None
    """OpenAI's error code, where it defines one."""
    outcome: ClassVar[str] = "error"
    """How a call that it ends is counted in metrics, traces and the log."""

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes, and their constructors take other arguments than the message.
        return _restored, (type(self), self.args, self.__dict__)


class InternalError(PagedRayError):
    """A defect of the server; the client does not see its details."""

    def __init__(self) -> None:
        super().__init__("Internal server error; see the server log.")


def _restored(
    kind: type[PagedRayError], args: tuple[object, ...], state: dict[str, object]
) -> PagedRayError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error

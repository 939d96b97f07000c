"""The errors that cross a border, each with the HTTP and gRPC status a client sees.

    PagedRayError
    |-- StartupError            the engine cannot start: one line, exit code 2
    |   |-- CheckpointError     a file of the model is missing, broken or unsupported
    |   `-- DeviceError         a device, port or other resource is not to be had
    |-- RequestError            a client's mistake or misfortune
    |   |-- InvalidRequestError 400 INVALID_ARGUMENT
    |   |   |-- CapacityError   it can never fit, however long it waits
    |   |   `-- ContextLengthError prompt and output are longer than the context
    |   |-- AuthenticationError 401 UNAUTHENTICATED
    |   |-- ForbiddenError      403 PERMISSION_DENIED
    |   |-- UnknownModelError   404 NOT_FOUND
    |   |-- OverloadedError     429 RESOURCE_EXHAUSTED
    |   `-- DeadlineError       504 DEADLINE_EXCEEDED
    `-- EngineError             503 UNAVAILABLE
        |-- WorkerError         a rank failed or died
        `-- ShuttingDownError   no new requests are taken

This module knows no protocol library: a gRPC status is its name.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "AuthenticationError",
    "CapacityError",
    "CheckpointError",
    "ContextLengthError",
    "DeadlineError",
    "DeviceError",
    "EngineError",
    "ForbiddenError",
    "InvalidRequestError",
    "OverloadedError",
    "PagedRayError",
    "RequestError",
    "ShuttingDownError",
    "StartupError",
    "UnknownModelError",
    "WorkerError",
]


class PagedRayError(Exception):
    """Anything this project raises on purpose."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str | None] = None
    """What OpenAI calls it beside the type, where it has a name for it."""

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross processes; their constructors take other things than the message.
        return _restored, (type(self), self.args, self.__dict__)


class StartupError(PagedRayError):
    """The engine cannot start; the message is one line that names the value and what is allowed."""


class CheckpointError(StartupError, ValueError):
    """A file of the model is missing, broken or describes something unsupported."""


class DeviceError(StartupError):
    """A device, port or other resource of the machine is not to be had."""


class RequestError(PagedRayError):
    """A request that is not served, with the reason its client is told."""


class InvalidRequestError(RequestError, ValueError):
    """A field of a request is not what it may be."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field at fault, as the client names it."""


class CapacityError(InvalidRequestError):
    """A request can never fit, however long it waits."""

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(
            f"The request needs {needed} KV blocks but the cache holds only {capacity}.",
            param="max_tokens",
        )


class ContextLengthError(InvalidRequestError):
    """A prompt, or what is to follow it, does not fit the context."""

    openai_code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """A call without a key, or with one that nobody has."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"


class ForbiddenError(RequestError):
    """A call that its tenant may not make."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    openai_type = "invalid_request_error"


class UnknownModelError(RequestError):
    """The request names a model that is not served here."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    openai_type = "invalid_request_error"
    openai_code = "model_not_found"

    def __init__(self, given: str, served: str) -> None:
        super().__init__(f"The model {given!r} is not served here; served is {served!r}.")
        self.param = "model"


class OverloadedError(RequestError):
    """The queue is full; the client may try again."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    openai_code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The deadline of a request passed before it was finished."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"


class EngineError(PagedRayError):
    """The engine cannot serve at present."""

    http_status = 503
    grpc_status = "UNAVAILABLE"


class WorkerError(EngineError):
    """A rank failed or died, and its group with it."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        """What a log is to keep beside the message, such as the rank's trace."""


class ShuttingDownError(EngineError):
    """The engine is shutting down and takes no new requests."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down and takes no new requests.")


def _restored(
    kind: type[PagedRayError], args: tuple[object, ...], state: dict[str, object]
) -> PagedRayError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error

"""The errors that cross an interface, each with the HTTP and gRPC status its client receives.

    PagedRayError
    |-- StartupError            the engine cannot start: one line, exit code 2
    |   |-- CheckpointError     a file of the model is missing, broken or unsupported
    |   `-- DeviceError         a device, port or other resource is not available
    |-- RequestError            the request cannot be served
    |   |-- InvalidRequestError 400 INVALID_ARGUMENT
    |   |   |-- CapacityError   it exceeds the whole KV cache
    |   |   |-- ContextLengthError prompt and output exceed the context
    |   |   |   |-- PromptLengthError the prompt alone does
    |   |   |   `-- OutputLengthError max_tokens exceeds what the prompt leaves
    |   |   `-- UnknownPreviousError it continues a response that is not stored
    |   |-- AuthenticationError 401 UNAUTHENTICATED
    |   |-- ForbiddenError      403 PERMISSION_DENIED
    |   |-- UnknownModelError   404 NOT_FOUND
    |   |-- UnknownStreamError  404 NOT_FOUND
    |   |-- UnknownResponseError 404 NOT_FOUND
    |   |-- DuplicateIdError    409 ALREADY_EXISTS
    |   |-- OverloadedError     429 RESOURCE_EXHAUSTED
    |   |-- StalledReaderError  408 ABORTED: a client does not read its stream
    |   |   `-- UnreadError     it has left too many bytes unread
    |   |-- StreamTakenError    409 ABORTED: another call reads the stream
    |   |-- UnsupportedError    501 UNIMPLEMENTED
    |   |-- DeadlineError       504 DEADLINE_EXCEEDED
    |   `-- LethalRequestError  422 INTERNAL: its ranks die whenever it runs; not to be retried
    |-- EngineError             503 UNAVAILABLE
    |   |-- WorkerError         a rank failed or died
    |   |   `-- HungRankError   a rank makes no progress
    |   `-- ShuttingDownError   no new requests are accepted
    `-- InternalError           500 INTERNAL: a defect, whose details are in the server log

The module knows no protocol library: a gRPC status is its name.
"""

from __future__ import annotations

from typing import ClassVar

from pagedray.text import pluralize

__all__ = [
    "AuthenticationError",
    "CapacityError",
    "CheckpointError",
    "ContextLengthError",
    "DeadlineError",
    "DeviceError",
    "DuplicateIdError",
    "EngineError",
    "ForbiddenError",
    "HungRankError",
    "InternalError",
    "InvalidRequestError",
    "LethalRequestError",
    "OutputLengthError",
    "OverloadedError",
    "PagedRayError",
    "PromptLengthError",
    "RequestError",
    "ShuttingDownError",
    "StalledReaderError",
    "StartupError",
    "StreamTakenError",
    "UnknownModelError",
    "UnknownPreviousError",
    "UnknownResponseError",
    "UnknownStreamError",
    "UnreadError",
    "UnsupportedError",
    "WorkerError",
    "invalid_field",
]


class PagedRayError(Exception):
    """Base class of all errors that this project raises deliberately."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    grpc_reason: ClassVar[str] = "INTERNAL"
    """The reason in google.rpc.ErrorInfo."""
    openai_type: ClassVar[str] = "server_error"
    openai_code: ClassVar[str | None] = None
    """OpenAI's error code, if OpenAI defines one."""
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


class StartupError(PagedRayError):
    """The engine cannot start; the message is one line with the given and the allowed values."""


class CheckpointError(StartupError, ValueError):
    """A file of the model is missing, broken or describes something unsupported."""


class DeviceError(StartupError):
    """A device, port or other resource of the machine is not available."""


_LOST = "the replica that kept it has ended or does not respond"


class RequestError(PagedRayError):
    """A request that cannot be served; the message is sent to its client."""

    openai_type = "invalid_request_error"


class InvalidRequestError(RequestError, ValueError):
    """A field of a request has an invalid value."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    grpc_reason = "INVALID_REQUEST"
    outcome = "invalid"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The invalid field, by the client's name for it."""


def invalid_field(name: str, problem: str) -> InvalidRequestError:
    """Return the error of a field, by the client's name for it, that begins with its name."""
    return InvalidRequestError(f"{name} {problem}", param=name)


class CapacityError(InvalidRequestError):
    """A request needs more KV blocks than the cache has."""

    grpc_reason = "OVER_CAPACITY"
    outcome = "too_large"

    def __init__(self, needed: int, capacity: int) -> None:
        super().__init__(
            f"The request needs {needed} KV blocks, but the cache has only {capacity}.",
            param="max_tokens",
        )


class ContextLengthError(InvalidRequestError):
    """A prompt, or the prompt and its output, exceed the context."""

    openai_code = "context_length_exceeded"
    outcome = "too_large"


class PromptLengthError(ContextLengthError):
    """A prompt leaves no token of the context for its output."""

    def __init__(self, num_tokens: int, context: int, *, param: str) -> None:
        super().__init__(
            f"{param} has {num_tokens} tokens, but the context length of {context} allows at most "
            f"{context - 1} and one generated token.",
            param=param,
        )
        self.num_tokens = num_tokens
        self.context = context


class OutputLengthError(ContextLengthError):
    """A request may generate more tokens than its prompt leaves of the context."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, context: int) -> None:
        super().__init__(
            f"max_tokens must be from 1 to {context - num_prompt_tokens}, not {max_tokens}: the "
            f"prompt has {pluralize(num_prompt_tokens, 'token')} and the context length is "
            f"{context}.",
            param="max_tokens",
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.context = context


class UnknownPreviousError(InvalidRequestError):
    """A call continues a response that its tenant has not stored, or that is forgotten."""

    openai_code = "previous_response_not_found"

    def __init__(self, response_id: str, *, is_lost: bool = False) -> None:
        """`is_lost` is true if the replica which kept it has ended."""
        why = f": {_LOST}; send the earlier items as input" if is_lost else ""
        super().__init__(
            f"Previous response with id {response_id[:80]!r} not found{why}.",
            param="previous_response_id",
        )


class AuthenticationError(RequestError):
    """Missing or invalid API key."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    grpc_reason = "UNAUTHENTICATED"
    openai_code = "invalid_api_key"
    outcome = "unauthenticated"


class ForbiddenError(RequestError):
    """The tenant of the API key may not make this call."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    grpc_reason = "FORBIDDEN"
    outcome = "forbidden"


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    grpc_reason = "UNKNOWN_MODEL"
    openai_code = "model_not_found"
    outcome = "unknown_model"

    def __init__(self, given: str, *served: str) -> None:
        *others, last = map(repr, served)
        names = f"{', '.join(others)} or {last}" if others else last
        super().__init__(f"The model {given!r} does not exist; this server serves {names}.")
        self.param = "model"


class UnknownStreamError(RequestError):
    """No stream can be resumed as the client asks; the same for every reason."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    grpc_reason = "UNKNOWN_STREAM"
    openai_code = "stream_not_found"
    outcome = "unknown_stream"

    def __init__(self) -> None:
        super().__init__(
            "The stream cannot be resumed from this position: no resumable request of this tenant "
            "has this id, its grace period is over, or it has not sent as many messages."
        )


class UnknownResponseError(RequestError):
    """The tenant has stored no response of this id, or it is forgotten."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    grpc_reason = "UNKNOWN_RESPONSE"
    outcome = "unknown_response"

    def __init__(self, response_id: str, *, is_lost: bool = False) -> None:
        """`is_lost` is true if the replica which kept it has ended."""
        why = f": {_LOST}" if is_lost else ""
        super().__init__(f"Response with id {response_id[:80]!r} not found{why}.")


class DuplicateIdError(RequestError):
    """The client's id of a request is in use."""

    http_status = 409
    grpc_status = "ALREADY_EXISTS"
    grpc_reason = "DUPLICATE_ID"
    openai_code = "duplicate_request_id"
    outcome = "invalid"

    def __init__(self, client_id: str, *, is_resumable: bool = False) -> None:
        what = "a stream that can be resumed" if is_resumable else "a running request"
        super().__init__(f"request_id {client_id!r} is in use by {what}.")
        self.param = "request_id"


class StalledReaderError(RequestError):
    """A client does not read its stream."""

    http_status = 408
    grpc_status = "ABORTED"
    grpc_reason = "READER_STALLED"
    openai_type = "timeout_error"
    outcome = "stalled"


class UnreadError(StalledReaderError):
    """A client has left more output unread than the server keeps."""

    def __init__(self, whose: str, limit: int) -> None:
        super().__init__(
            f"The stream was aborted because its client did not read it: a {whose} may leave at "
            f"most {limit} bytes of output unread."
        )


class StreamTakenError(RequestError):
    """Another call has resumed the stream."""

    http_status = 409
    grpc_status = "ABORTED"
    grpc_reason = "STREAM_TAKEN"
    openai_code = "stream_taken"
    outcome = "cancelled"

    def __init__(self) -> None:
        super().__init__("The stream is being read by another call that resumed it.")


class UnsupportedError(RequestError):
    """This server does not support the request."""

    http_status = 501
    grpc_status = "UNIMPLEMENTED"
    grpc_reason = "UNSUPPORTED"
    outcome = "invalid"


class OverloadedError(RequestError):
    """The queue is full; the client may retry."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    grpc_reason = "OVERLOADED"
    openai_type = "rate_limit_error"
    openai_code = "rate_limit_exceeded"
    outcome = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineError(RequestError):
    """The deadline of a request passed before it was finished."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    grpc_reason = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"
    outcome = "deadline"


class LethalRequestError(RequestError):
    """The ranks die whenever the request runs; the log says how."""

    # Clients retry 500.
    http_status = 422
    openai_type = "server_error"
    grpc_reason = "LETHAL_REQUEST"
    openai_code = "lethal_request"

    def __init__(self) -> None:
        super().__init__(
            "The request cannot be served: the processes that run it crash. Do not send it again."
        )


class EngineError(PagedRayError):
    """The engine is not available; another replica may be."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    grpc_reason = "ENGINE_UNAVAILABLE"
    outcome = "unavailable"
    retry_after_s = 1.0
    """When the client may try again: this replica may be back soon, or another replica is chosen.
    """


class WorkerError(EngineError):
    """A rank failed or died, which ends its group."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details
        """For the log, in addition to the message, such as the rank's traceback."""


class HungRankError(WorkerError):
    """A rank makes no progress."""


class ShuttingDownError(EngineError):
    """The engine is shutting down and accepts no new requests."""

    grpc_reason = "SHUTTING_DOWN"
    outcome = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The server is shutting down and accepts no new requests.")

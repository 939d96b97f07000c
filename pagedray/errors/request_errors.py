"""Errors of requests that cannot be served; their messages are sent to the clients."""

from __future__ import annotations

from pagedray.errors.base import PagedRayError
from pagedray.wording.counted import counted

__all__ = [
    "AuthenticationError",
    "CapacityError",
    "ContextLengthError",
    "DeadlineError",
    "DuplicateIdError",
    "ForbiddenError",
    "InvalidRequestError",
    "LethalRequestError",
    "OutputLengthError",
    "OverloadedError",
    "PromptLengthError",
    "RequestError",
    "StalledReaderError",
    "StreamTakenError",
    "UnknownModelError",
    "UnknownPreviousError",
    "UnknownResponseError",
    "UnknownStreamError",
    "UnreadError",
    "UnsupportedError",
]

_LOST = "the replica that kept it has ended or does not respond"


class RequestError(PagedRayError):
    """A request that cannot be served; the message is sent to its client."""


class InvalidRequestError(RequestError, ValueError):
    """A field of a request has an invalid value."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    grpc_reason = "INVALID_REQUEST"
    openai_type = "invalid_request_error"
    outcome = "invalid"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The invalid field, by the client's name for it."""


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
            f"prompt has {counted(num_prompt_tokens, 'token')} and the context length is "
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
    openai_type = "invalid_request_error"
    openai_code = "invalid_api_key"
    outcome = "unauthenticated"


class ForbiddenError(RequestError):
    """The tenant of the API key may not make this call."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    grpc_reason = "FORBIDDEN"
    openai_type = "invalid_request_error"
    outcome = "forbidden"


class UnknownModelError(RequestError):
    """The request names a model that this server does not serve."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    grpc_reason = "UNKNOWN_MODEL"
    openai_type = "invalid_request_error"
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
    openai_type = "invalid_request_error"
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
    openai_type = "invalid_request_error"
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
    openai_type = "invalid_request_error"
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
    openai_type = "invalid_request_error"
    openai_code = "stream_taken"
    outcome = "cancelled"

    def __init__(self) -> None:
        super().__init__("The stream is being read by another call that resumed it.")


class UnsupportedError(RequestError):
    """This server does not offer what the client requests."""

    http_status = 501
    grpc_status = "UNIMPLEMENTED"
    grpc_reason = "UNSUPPORTED"
    openai_type = "invalid_request_error"
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
    grpc_reason = "LETHAL_REQUEST"
    openai_code = "lethal_request"

    def __init__(self) -> None:
        super().__init__(
            "The request cannot be served: the processes that run it crash. Do not send it again."
        )

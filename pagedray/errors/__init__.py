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

The package knows no protocol library: a gRPC status is its name.
"""

from pagedray.errors.base import InternalError, PagedRayError
from pagedray.errors.engine_errors import (
    EngineError,
    HungRankError,
    ShuttingDownError,
    WorkerError,
)
from pagedray.errors.request_errors import (
    AuthenticationError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    DuplicateIdError,
    ForbiddenError,
    InvalidRequestError,
    LethalRequestError,
    OutputLengthError,
    OverloadedError,
    PromptLengthError,
    RequestError,
    StalledReaderError,
    StreamTakenError,
    UnknownModelError,
    UnknownPreviousError,
    UnknownResponseError,
    UnknownStreamError,
    UnreadError,
    UnsupportedError,
)
from pagedray.errors.startup_errors import CheckpointError, DeviceError, StartupError

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
]

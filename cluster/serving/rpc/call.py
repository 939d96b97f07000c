"""The context, metadata, deadline and origin of a gRPC call, and errors as gRPC sends them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from cluster.serving.continuation import Continuation
from cluster.serving.inputs import CallOrigin, Frontend
from cluster.serving.open_calls import OpenCall
from pagedray.errors import (
    EngineError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    UnknownModelError,
)
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

__all__ = [
    "AUTHORIZATION",
    "DETAILS_KEY",
    "Context",
    "RpcCall",
    "abort_call",
    "code_of",
    "drop_frames",
    "field_of",
    "metadata_of",
    "status_of",
]

logger = logging.getLogger(__name__)

AUTHORIZATION = "authorization"
"""The metadata key of the API key."""
# grpc's own stubs leave the context's message types open.
Context = grpc.aio.ServicerContext[Any, Any]

DOMAIN = "pagedray"
"""The domain of the reasons in google.rpc.ErrorInfo."""
DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata that holds a serialized status."""
_SAMPLING_FIELDS = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def _never(callback: Callable[[], None]) -> None:
    """Ignore a callback, for callers that cannot report the end of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcCall:
    """One call, from our own server or from Ray Serve's proxy."""

    frontend: Frontend = "grpc"
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Keys are in lower case."""
    remaining_s: float | None = None
    """Time until the deadline; None without a deadline."""
    add_done_callback: Callable[[Callable[[], None]], None] = _never
    """Registers a callback for the end of the call, also if it is cancelled during a write."""
    continuation: Continuation | None = None
    """Keeps the call the same in another replica; from the proxy in front of this replica."""
    entered: OpenCall | None = None
    """The call in its tenant's limits, if its method counts and its message has been received."""
    num_bytes: int = 0
    """The size of its message."""

    @property
    def authorization(self) -> str | None:
        """The credentials as sent, such as `Bearer KEY`."""
        return self.metadata.get(AUTHORIZATION)

    @property
    def origin(self) -> CallOrigin:
        """The frontend and the trace of the call."""
        return CallOrigin(
            frontend=self.frontend,
            traceparent=self.metadata.get("traceparent"),
            tracestate=self.metadata.get("tracestate"),
        )


def metadata_of(entries: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """Return the text entries of a call's metadata; values of one key are joined."""
    metadata: dict[str, str] = {}
    for key, value in entries or ():
        if isinstance(value, str):
            # As in HTTP. Two API keys then form an invalid key.
            metadata[key] = f"{metadata[key]}, {value}" if key in metadata else value
    return metadata


async def abort_call(context: Context, error: Exception) -> NoReturn:
    """End a call with the status and details of an error."""
    if isinstance(error, grpc.aio.AbortError | grpc.aio.BaseError | grpc.RpcError):
        raise error
    status = status_of(error)
    drop_frames(error)
    await context.abort(
        code_of(status), status.message, ((DETAILS_KEY, status.SerializeToString()),)
    )
    raise AssertionError("abort raises an error")


def drop_frames(error: BaseException) -> None:
    """Free the variables in the frames of an error and of its causes.

    gRPC keeps the error of an aborted call in a reference cycle, so the call's message would stay
    in memory until a garbage collection.
    """
    waiting: BaseException | None = error
    while waiting is not None:
        waiting.__traceback__ = None
        waiting = waiting.__context__


def status_of(error: Exception) -> Status:
    """Return the status of an error; a defect is logged, and its client gets no details of it."""
    if not isinstance(error, PagedRayError):
        logger.error("A gRPC call failed.", exc_info=error)
        error = InternalError()
    field = field_of(error)
    details: list[Message] = [
        ErrorInfo(
            reason=error.grpc_reason, domain=DOMAIN, metadata={"field": field} if field else {}
        )
    ]
    if field and error.grpc_status == "INVALID_ARGUMENT":
        details.append(
            BadRequest(
                field_violations=[BadRequest.FieldViolation(field=field, description=str(error))]
            )
        )
    retry_s = _retry_s_of(error)
    if retry_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(math.ceil(retry_s * 1000))
        details.append(retry)
    return _status(error.grpc_status, str(error), details)


def code_of(status: Status) -> grpc.StatusCode:
    """Return the gRPC library's code of a status."""
    return _CODES[status.code]


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _status(name: str, text: str, details: list[Message]) -> Status:
    status = Status(code=grpc.StatusCode[name].value[0], message=text)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def field_of(error: PagedRayError) -> str | None:
    """Return the field of the message that an error is about, if any."""
    if not isinstance(error, InvalidRequestError | UnknownModelError):
        return None
    # The servicer knows no messages and gives a sampling parameter its bare name.
    if error.param in _SAMPLING_FIELDS:
        return f"sampling.{error.param}"
    return error.param


def _retry_s_of(error: PagedRayError) -> float | None:
    return error.retry_after_s if isinstance(error, OverloadedError | EngineError) else None

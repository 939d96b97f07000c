"""From errors to what a gRPC client is told: google.rpc.Status with its details."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from pagedray.errors import (
    AuthenticationError,
    CapacityError,
    DeadlineError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    OverloadedError,
    PagedRayError,
    ShuttingDownError,
    UnknownModelError,
)
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from google.protobuf.message import Message

__all__ = ["DETAILS_KEY", "DOMAIN", "code_of", "status_of"]

logger = logging.getLogger(__name__)

DOMAIN = "pagedray"
"""Whose reasons these are, in google.rpc.ErrorInfo."""
DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata that holds a serialized status."""

_INTERNAL_TEXT = "The server made a mistake; its log says which."
_RETRY_S = 1.0
# The first class that an error belongs to decides.
_REASONS: tuple[tuple[type[PagedRayError], str], ...] = (
    (CapacityError, "OVER_CAPACITY"),
    (InvalidRequestError, "INVALID_REQUEST"),
    (AuthenticationError, "UNAUTHENTICATED"),
    (ForbiddenError, "FORBIDDEN"),
    (UnknownModelError, "UNKNOWN_MODEL"),
    (OverloadedError, "OVERLOADED"),
    (DeadlineError, "DEADLINE_EXCEEDED"),
    (ShuttingDownError, "SHUTTING_DOWN"),
    (EngineError, "ENGINE_UNAVAILABLE"),
)
# Where HTTP's name of a field is another one.
_FIELDS = {"input": "prompts", "tokens": "token_ids"}
_SAMPLING_FIELDS = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)


def status_of(error: Exception) -> Status:
    """Return what a client is told of an error; a defect is logged and its client told nothing."""
    if not isinstance(error, PagedRayError):
        logger.error("A gRPC call failed.", exc_info=error)
        return _status("INTERNAL", _INTERNAL_TEXT, [_info("INTERNAL", {})])
    field = _field_of(error)
    details: list[Message] = [_info(_reason_of(error), {"field": field} if field else {})]
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
    """Return the code of a status as the gRPC library has it."""
    return _CODES[status.code]


_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


def _status(name: str, text: str, details: list[Message]) -> Status:
    status = Status(code=grpc.StatusCode[name].value[0], message=text)
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _info(reason: str, metadata: dict[str, str]) -> ErrorInfo:
    return ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata)


def _reason_of(error: PagedRayError) -> str:
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "INTERNAL")


def _field_of(error: PagedRayError) -> str | None:
    if not isinstance(error, InvalidRequestError | UnknownModelError):
        return None
    # The servicer knows no messages: it names a sampling parameter by itself.
    if error.param in _SAMPLING_FIELDS:
        return f"sampling.{error.param}"
    return None if error.param is None else _FIELDS.get(error.param, error.param)


def _retry_s_of(error: PagedRayError) -> float | None:
    if isinstance(error, OverloadedError):
        return error.retry_after_s
    # Another replica may serve it, and this one may be back soon.
    return _RETRY_S if isinstance(error, EngineError) else None

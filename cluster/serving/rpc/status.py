"""Errors as gRPC sends them: google.rpc.Status with its details."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

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
    from google.protobuf.message import Message

__all__ = ["DETAILS_KEY", "DOMAIN", "code_of", "field_of", "status_of"]

logger = logging.getLogger(__name__)

DOMAIN = "pagedray"
"""The domain of the reasons in google.rpc.ErrorInfo."""
DETAILS_KEY = "grpc-status-details-bin"
"""The trailing metadata that holds a serialized status."""

_SAMPLING_FIELDS = frozenset(pb.SamplingParams.DESCRIPTOR.fields_by_name)


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
        packed = Any()
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

"""Limits on requests before they are validated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cluster.serving.memory.tenant_bytes import BufferLimits
from pagedray.errors import ContextLengthError
from pagedray.sampling_params import MAX_N

if TYPE_CHECKING:
    from pagedray.config import EngineConfig

__all__ = [
    "LARGEST",
    "MAX_REQUEST_BYTES",
    "IntakeLimits",
    "RequestSize",
    "check_num_messages",
    "request_size",
]

MAX_REQUEST_BYTES = 4 * 2**20
"""The longest message or body unless an operator allows longer messages."""
_BASE_BYTES = 2**20
"""Bytes for everything but prompts, such as schemas and tools."""
_BYTES_PER_TOKEN = 8
"""A token id in JSON, with its comma."""
_LIST_VALUES = 2**13
"""Entries that a list may have even if the context is shorter."""
_OTHER_VALUES = 2**15
_MAX_VALUES = 2**20
_MIN_MESSAGES = 64
_MAX_MESSAGES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """The limits on requests that an operator may set."""

    read_timeout_s: float = 30.0
    """How long the message or body of a request may take to arrive."""
    received: BufferLimits = field(default_factory=BufferLimits)
    """Memory for requests that are being received."""
    wait_s: float = 1.0
    """How long a message waits for room in that memory.

    Earlier messages arrive within milliseconds if their clients have sent all of them.
    """
    request_bytes: int | None = None
    """The longest message or body; None derives it from the context length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSize:
    """How large one request may be, before its parts are looked at."""

    num_bytes: int = MAX_REQUEST_BYTES
    """Bytes of a body or message."""
    num_values: int = _MAX_VALUES
    """Values in a JSON body."""
    num_list_values: int = _MAX_VALUES
    """Values in one list, of which token ids are the longest."""
    num_messages: int = _MAX_MESSAGES
    """Messages of a conversation, each of which has at least one token."""
    context: int = _MAX_VALUES
    """The context length, which errors name."""


LARGEST = RequestSize()
"""Limits that no model may exceed."""


def request_size(config: EngineConfig, limits: IntakeLimits) -> RequestSize:
    """Return the limits for a model: by default, all prompts that a call may have fit."""
    context = config.max_model_len
    num_bytes = min(MAX_REQUEST_BYTES, _BASE_BYTES + _BYTES_PER_TOKEN * context * MAX_N)
    num_values = min(_MAX_VALUES, _OTHER_VALUES + context * MAX_N)
    if config.model.pools:
        # Its calls may have more texts than others have prompts.
        num_bytes, num_values = MAX_REQUEST_BYTES, _MAX_VALUES
    return RequestSize(
        num_bytes=num_bytes if limits.request_bytes is None else limits.request_bytes,
        num_values=num_values,
        num_list_values=max(_LIST_VALUES, context),
        num_messages=max(_MIN_MESSAGES, min(_MAX_MESSAGES, context)),
        context=context,
    )


def check_num_messages(num_messages: int, size: RequestSize) -> None:
    """Raise ContextLengthError for more messages than the context has tokens."""
    if num_messages > size.num_messages and size.num_messages < LARGEST.num_messages:
        raise ContextLengthError(
            f"messages may have at most {size.num_messages} entries with a context length of "
            f"{size.context} (--max-model-len), not {num_messages}.",
            param="messages",
        )

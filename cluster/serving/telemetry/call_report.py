"""What is known of one call when it has ended: for metrics, its trace and its line in the log."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.serving.inputs import CallOrigin, Operation
from pagedray.errors import (
    AuthenticationError,
    CapacityError,
    ContextLengthError,
    DeadlineError,
    EngineError,
    ForbiddenError,
    InvalidRequestError,
    OverloadedError,
    ShuttingDownError,
    UnknownModelError,
)
from pagedray.request import SamplingParams

__all__ = ["OUTCOMES", "CallReport", "outcome_of"]

# The first that fits is it.
_OUTCOME_OF: tuple[tuple[type[Exception], str], ...] = (
    (CapacityError, "too_large"),
    (ContextLengthError, "too_large"),
    (InvalidRequestError, "invalid"),
    (UnknownModelError, "unknown_model"),
    (AuthenticationError, "unauthenticated"),
    (ForbiddenError, "forbidden"),
    (OverloadedError, "overloaded"),
    (DeadlineError, "deadline"),
    (ShuttingDownError, "shutting_down"),
    (EngineError, "unavailable"),
)
OUTCOMES = (
    *("stop", "length", "tool_calls", "abort", "cancelled", "error"),
    *dict.fromkeys(outcome for _, outcome in _OUTCOME_OF),
)
"""All ways in which calls end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """One call, from arrival to end; times are on the monotonic clock, None is never."""

    operation: Operation
    origin: CallOrigin
    tenant: str
    model: str
    """The name under which the model is served, whatever the client called it."""
    id: str
    """The id that its client knows; empty if the call was refused before it had one."""
    sampling: SamplingParams | None
    outcome: str
    is_refused: bool
    """Whether it ended before it reached the engine."""
    arrived_s: float
    validated_s: float | None
    """When its prompts were tokenized and it was found to be in order."""
    started_s: float | None
    """When the engine first planned it."""
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


def outcome_of(error: Exception) -> str:
    """Return the word for how a call ends that ends with `error`."""
    return next((outcome for kind, outcome in _OUTCOME_OF if isinstance(error, kind)), "error")

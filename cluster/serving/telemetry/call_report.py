"""The record of a call that ended, for metrics, its trace and its log line."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.serving.inputs import CallOrigin, Operation
from pagedray.errors import PagedRayError
from pagedray.sampling_params import SamplingParams

__all__ = ["CallReport", "outcome_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReport:
    """One call; times are on the monotonic clock, and None if the event did not happen."""

    operation: Operation
    origin: CallOrigin
    tenant: str
    model: str
    """The served name of the model."""
    id: str
    """The id known to the client; empty if the call was rejected before it had an id."""
    sampling: SamplingParams | None
    outcome: str
    is_rejected: bool
    """Whether it ended before it reached the engine."""
    arrived_s: float
    validated_s: float | None
    """When the prompts were tokenized and validated."""
    started_s: float | None
    """When the call was first scheduled."""
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float
    num_sequences: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int

    @property
    def generates_tokens(self) -> bool:
        """Whether it requested tokens rather than vectors or scores."""
        return self.operation in ("chat", "text_completion")


def outcome_of(error: Exception) -> str:
    """Return the outcome of a call that ends with `error`."""
    return error.outcome if isinstance(error, PagedRayError) else "error"

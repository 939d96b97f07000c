"""One log line for each call that ends: tenant, times, tokens and outcome; or for its rejection.

A line contains no text of a client except the call's id, and no key. The error of a rejected call
may quote the beginning of an invalid value.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.serving.inputs import CallOrigin, Operation
from cluster.serving.telemetry.log_lines import LineRate
from pagedray.errors import PagedRayError
from pagedray.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.inputs import Frontend

__all__ = ["CallReport", "RejectedCalls", "log_call", "outcome_of"]

logger = logging.getLogger(__name__)

_MAX_CHARACTERS = 300
"""Characters of a field of a rejected call."""
_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-")


def log_call(report: CallReport) -> None:
    """Write the line of a call."""
    if logger.isEnabledFor(logging.INFO):
        # Formatters write the fields as text or JSON (cluster/serving/telemetry/log_lines.py).
        logger.info("call", extra={"fields": _fields(report)})


def _fields(report: CallReport) -> dict[str, str | int | float]:
    begin_s = report.arrived_s
    times = {
        "validated_s": report.validated_s,
        "started_s": report.started_s,
        "first_token_s": report.first_token_s,
        "duration_s": report.ended_s,
    }
    fields: dict[str, str | int | float] = {
        "id": report.id,
        "tenant": report.tenant,
        "frontend": report.origin.frontend,
        "operation": report.operation,
        "outcome": report.outcome,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "generated_tokens": report.num_generated_tokens,
        # Since the arrival.
        **{name: round(at_s - begin_s, 6) for name, at_s in times.items() if at_s is not None},
    }
    trace_id = trace_id_of(report.origin.traceparent)
    if trace_id is not None:
        fields["trace_id"] = trace_id
    return fields


class RejectedCalls:
    """Writes a line for each call that a frontend rejects, up to a rate for each status."""

    def __init__(self, make_rate: Callable[[], LineRate] = LineRate) -> None:
        # Statuses are few, and none hides the lines of another.
        self._rates: defaultdict[object, LineRate] = defaultdict(make_rate)

    def note(
        self,
        frontend: Frontend,
        *,
        status: int | str,
        method: str,
        path: str,
        param: object,
        error: str,
    ) -> None:
        """Write the line of a rejected call, unless there are too many of its status."""
        if not logger.isEnabledFor(logging.INFO):
            return
        num_omitted = self._rates[frontend, status].count_event()
        if num_omitted is None:
            return
        fields: dict[str, str | int] = {"frontend": frontend, "status": status}
        given = {"method": method, "path": path, "param": param, "error": error}
        # Formatters quote the fields and escape characters that begin a line.
        fields |= {name: str(one)[:_MAX_CHARACTERS] for name, one in given.items() if one}
        if num_omitted:
            fields["omitted"] = num_omitted
        logger.info("rejected", extra={"fields": fields})


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id of a header; None if it is missing or invalid."""
    found = None if traceparent is None else _TRACE_PARENT.match(traceparent)
    return None if found is None else found[1]


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

"""One line in the log for each call that ends: who, how long, how many tokens, how it ended.

Nothing of what a client wrote is in it but the call's id, which is quoted; no text and no key.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from cluster.serving.telemetry.trace_parent import trace_id_of

if TYPE_CHECKING:
    from cluster.serving.telemetry.call_report import CallReport

__all__ = ["log_call"]

logger = logging.getLogger(__name__)


def log_call(report: CallReport) -> None:
    """Write the line of a call that ended."""
    if logger.isEnabledFor(logging.INFO):
        # Handlers show the fields, each in its own way (cluster/serving/telemetry/log_lines.py).
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
        "front": report.origin.frontend,
        "operation": report.operation,
        "outcome": report.outcome,
        "prompt_tokens": report.num_prompt_tokens,
        "cached_tokens": report.num_cached_tokens,
        "generated_tokens": report.num_generated_tokens,
        # All from its arrival on.
        **{name: round(at_s - begin_s, 6) for name, at_s in times.items() if at_s is not None},
    }
    trace_id = trace_id_of(report.origin.traceparent)
    if trace_id is not None:
        fields["trace_id"] = trace_id
    return fields

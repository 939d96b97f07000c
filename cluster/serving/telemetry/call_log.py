"""One log line for each call that ends: tenant, times, tokens and outcome.

It contains no text of a client except the call's id, which is quoted, and no key.
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

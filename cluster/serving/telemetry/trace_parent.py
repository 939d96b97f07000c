"""The header `traceparent` of W3C Trace Context."""

from __future__ import annotations

import re

__all__ = ["trace_id_of"]

_TRACE_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-")


def trace_id_of(traceparent: str | None) -> str | None:
    """Return the trace id of a header; None if it is missing or invalid."""
    found = None if traceparent is None else _TRACE_PARENT.match(traceparent)
    return None if found is None else found[1]

"""Requests that schemathesis generates from the OpenAPI document.

    python -m tests.load.generated_requests

None may cause a server error or a response that the document does not describe, or take long.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.load.measured_server import MeasuredServer, pin_load
from tests.load.report import Report, times_ms

__all__ = ["ask_all"]

_CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]
_TIMEOUT_S = 20
_BODILESS_REQUESTS = 20
"""At most, for an endpoint without a body, since there are few different ones."""
_NUM_SLOWEST = 10


class _Asked:
    """The responses to the requests."""

    def __init__(self) -> None:
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.slowest: list[tuple[float, str, str]] = []
        self.faults: list[str] = []

    def add(self, label: str, status: int, seconds: float, body: object) -> None:
        """Add a response."""
        self.statuses[f"{label} {status}"] += 1
        self.seconds.append(seconds)
        self.slowest = sorted([*self.slowest, (seconds, label, repr(body)[:600])])[-_NUM_SLOWEST:]


def ask_all(url: str, number: int, *, model: str, first_seed: int = 0) -> dict[str, object]:
    """Send at least `number` requests, generated from the server's OpenAPI document."""
    asked = _Asked()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]  # type: ignore[union-attr]  # each is there
    num_with_body = sum(operation.method == "post" for operation in operations)
    for operation in operations:
        share = -(-number // num_with_body)
        if operation.method != "post":
            share = min(share, _BODILESS_REQUESTS)

        @seed(first_seed)
        @given(case=operation.as_strategy())
        @settings(
            max_examples=share,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        def call(case: schemathesis.Case) -> None:  # type: ignore[type-arg]  # the library leaves it open
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                # Any other model is rejected before anything else is checked.
                case.body["model"] = model
            started_s = time.perf_counter()
            label = case.operation.label
            try:
                answer = case.call(base_url=url, timeout=_TIMEOUT_S)
            except Exception as error:
                asked.faults.append(f"{label}: {error!r} {case.body!r:.600}")
                asked.add(label, 0, time.perf_counter() - started_s, case.body)
                return
            asked.add(label, answer.status_code, time.perf_counter() - started_s, case.body)
            # In OpenAPI 3.1 the schema describes the text of a whole event stream, but schemathesis
            # applies it to each event.
            is_stream = answer.headers["content-type"] == ["text/event-stream; charset=utf-8"]
            checks = _CHECKS if is_stream else [*_CHECKS, response_schema_conformance]
            try:
                case.validate_response(answer, checks=checks)
            except (Exception, FailureGroup) as error:
                asked.faults.append(f"{label}: {error} {case.body!r:.600}")

        call()
    return {
        "requests": len(asked.seconds),
        "statuses": dict(sorted(asked.statuses.items())),
        "times": times_ms(asked.seconds),
        "slowest": [
            {"ms": round(seconds * 1e3, 1), "endpoint": label, "body": body}
            for seconds, label, body in reversed(asked.slowest)
        ],
        "faults": asked.faults,
    }


def main() -> None:
    """Send requests, and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="at least (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    Report.add_argument(parser)
    options = parser.parse_args()
    report = Report("tests.load.generated_requests")
    pin_load()
    with MeasuredServer("--log-level=warning") as server:
        report.add("server", server.command)
        report.add(
            "generated",
            ask_all(server.url, options.requests, model="tiny-llama", first_seed=options.seed),
        )
        report.add("answers_good_requests_afterwards", server.answers())
        report.add("errors_in_log", server.logged_errors())
    report.write(options.output)


if __name__ == "__main__":
    main()

"""Short runs of the programs in this folder against a real server.

Times are not asserted, since the machine may be busy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.load import cancels, overload
from tests.load.measured_server import MeasuredServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def server() -> Iterator[MeasuredServer]:
    """A server with a short queue, which must log no traceback."""
    with MeasuredServer(*overload.SERVER_ARGUMENTS) as running:
        yield running
        assert running.answers()
        assert running.logged_errors()["tracebacks"] == 0


@pytest.mark.parametrize("frontend", ["grpc", "http"])
async def test_cancelled_calls_leave_no_sequence_and_no_block(
    server: MeasuredServer, frontend: str
) -> None:
    canceller = cancels.Canceller(server)
    cancel = canceller.over_grpc if frontend == "grpc" else canceller.over_http
    times = await cancel(16)
    assert len(times.calls) == 16
    assert len(times.blocks) == 2


async def test_overload_is_rejected_and_the_rest_is_served(
    server: MeasuredServer,
) -> None:
    figures = await overload.overload(
        server, overload.HttpClient, num_tokens=32, peak_s=0.5, overload_s=2.0
    )
    refusals, served = figures["refusals"], figures["served"]
    assert isinstance(refusals, dict)
    assert isinstance(served, dict)
    assert refusals["count"] > 0
    assert served["count"] > 0

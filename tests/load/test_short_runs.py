"""Short runs of the programs in this folder against a real server.

Times are not asserted, since the machine may be busy.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import pytest

from tests.load import cancels, overload, tool_calls
from tests.load.measured_server import MeasuredServer
from tests.load.tenant_timing import p_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.tools.tool_calls import ToolCallFormat


@pytest.fixture(scope="module")
def server() -> Iterator[MeasuredServer]:
    """A server with a short queue and tools, which must log no traceback."""
    arguments = (*overload.SERVER_ARGUMENTS, *tool_calls.server_arguments("hermes"))
    with MeasuredServer(*arguments) as running:
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


@pytest.mark.slow
async def test_overload_is_rejected_and_the_rest_is_served(
    server: MeasuredServer,
) -> None:
    figures = await overload.overload(
        server,
        overload.HttpClient,
        num_tokens=32,
        peak_s=0.5,
        overload_s=1.0,
        least_per_s=1000.0,
        # More than the server accepts, and less than the connections that it allows one host under
        # a usual limit of descriptors, which a burst after a pause would exceed.
        max_open=100,
        calm_ratio=math.inf,
    )
    rejections, served = figures["refusals"], figures["served"]
    assert isinstance(rejections, dict)
    assert isinstance(served, dict)
    assert rejections["count"] > 0
    assert served["count"] > 0


@pytest.mark.slow
async def test_tool_calls_arrive_as_the_model_wrote_them(server: MeasuredServer) -> None:
    await check_tool_calls(server, "hermes", num_calls=20)


@pytest.mark.slow
@pytest.mark.parametrize("tool_format", ["mistral", "llama3_json"])
async def test_tool_calls_of_other_formats_arrive_as_the_model_wrote_them(
    tool_format: ToolCallFormat,
) -> None:
    with MeasuredServer(*tool_calls.server_arguments(tool_format)) as server:
        await check_tool_calls(server, tool_format, num_calls=200)


async def check_tool_calls(
    server: MeasuredServer, tool_format: ToolCallFormat, *, num_calls: int
) -> None:
    run = tool_calls.ToolCallRun(server, tool_format)
    await run.send(num_calls)
    assert not run.examples
    assert run.counts["calls"] >= num_calls
    assert run.counts["calls_beside_a_schema"] > 0
    assert run.counts["answers"] > 0
    assert run.counts["compared_streams"] > 0


def test_samples_that_do_not_overlap_differ() -> None:
    # scipy.stats.mannwhitneyu(range(20), range(20, 40), method="asymptotic")
    assert p_value(range(20), range(20, 40)) == pytest.approx(6.795615128e-08)


def test_equal_values_are_ties() -> None:
    assert p_value([1.0] * 20, [1.0] * 30) == 1.0
    assert p_value([1.0, 2.0] * 20, [2.0, 1.0] * 20) == pytest.approx(1.0)


def test_false_positives_are_as_frequent_as_the_p_value_says() -> None:
    generator = random.Random(0)
    found = [
        p_value([generator.random() for _ in range(40)], [generator.random() for _ in range(40)])
        for _ in range(400)
    ]
    assert 0.02 < sum(p < 0.05 for p in found) / len(found) < 0.08

"""Calls are freed when they end, not when the collector runs."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import httpx
import pytest

from cluster.serving.calls.generation_call import GenerationCall
from tests.serving.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving.conftest import Server


@pytest.fixture
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def num_calls() -> int:
    return sum(type(one) is GenerationCall for one in gc.get_objects())


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("num_lines", [2, 1000])
async def test_the_call_of_a_stream_is_freed_at_its_end(server: Server, num_lines: int) -> None:
    server.engine.reset()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
    before = num_calls()
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        # A client that has read enough leaves.
        for _, _ in zip(range(num_lines), answer.iter_lines(), strict=False):
            pass
    await wait_until(lambda: num_calls() == before, timeout_s=60.0)

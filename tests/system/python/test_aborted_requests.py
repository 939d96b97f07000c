"""Requests of `AsyncLLM` that are cancelled or aborted end, and free their blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cluster.llm.generation import Generation
from pagedray import AsyncLLM, SamplingParams
from pagedray.errors import DuplicateIdError, InvalidRequestError
from tests.system.server_process import TINY_LLAMA

TEXT = "def read_config(path):"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
NUM_BLOCKS = 96


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    found = AsyncLLM(
        TINY_LLAMA,
        device="cpu",
        dtype="float32",
        num_threads=1,
        executor="local",
        num_blocks=NUM_BLOCKS,
        show_progress=False,
    )
    yield found
    found.shutdown()


def num_free(engine: AsyncLLM) -> int:
    return engine.stats().scheduler.num_free_blocks


def wait_until_free(engine: AsyncLLM) -> None:
    deadline_s = time.monotonic() + 60.0
    while num_free(engine) != NUM_BLOCKS and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert num_free(engine) == NUM_BLOCKS


def test_cancelling_a_task_frees_its_blocks(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> int:
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate(TEXT * 8, ENDLESS):
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        held = NUM_BLOCKS - num_free(engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return held

    assert runner.run(run()) > 0
    wait_until_free(engine)


def test_leaving_the_loop_frees_its_blocks(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> None:
        stream = engine.generate(TEXT, ENDLESS, "left")
        async for _ in stream:
            break
        await stream.aclose()
        # The id is free again.
        await anext(again := engine.generate(TEXT, ENDLESS, "left"))
        await again.aclose()

    runner.run(run())
    wait_until_free(engine)


@pytest.mark.parametrize("request_id", [5, None, b"one", {"one": 1}, ["one", 5]])
def test_abort_of_other_ids_is_rejected(
    engine: AsyncLLM,
    runner: asyncio.Runner,
    request_id: Any,  # Any: what is wrong
) -> None:
    async def run() -> Generation:
        stream = engine.generate(TEXT, GREEDY, "one")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="request_id must be a string or several"):
            await engine.abort(request_id)
        return [result async for result in stream][-1]

    assert runner.run(run()).outputs[0].finish_reason == "length"


def test_aborted_requests_end_with_a_result(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> list[Generation]:
        found = []
        async for result in engine.generate(TEXT, ENDLESS, "one"):
            found.append(result)
            with pytest.raises(DuplicateIdError):
                await anext(engine.generate(TEXT, ENDLESS, "one"))
            await engine.abort(["one", "unknown"])
        return found

    last = runner.run(run())[-1]
    assert (last.request_id, last.outputs[0].finish_reason) == ("one", "abort")
    assert last.finished
    wait_until_free(engine)


def test_requests_are_aborted_before_they_begin(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> list[Generation]:
        async def read() -> list[Generation]:
            return [result async for result in engine.generate(TEXT, ENDLESS, "early")]

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        await engine.abort("early")
        return await task

    (*_, last) = runner.run(run())
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < ENDLESS.max_tokens  # type: ignore[operator]  # not None
    wait_until_free(engine)

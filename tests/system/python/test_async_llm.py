"""`AsyncLLM`: results as they grow, and requests that share the engine."""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import pagedray
from cluster.engine.engine_loop import EngineLoop
from cluster.llm.generation import BeamSearchOutput, Generation
from pagedray import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams
from pagedray.errors import (
    DuplicateIdError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    StartupError,
)
from pagedray.request import Request
from tests.system.engines import hold_steps, open_llm
from tests.system.server_process import TINY_LLAMA

TEXT = "def read_config(path):"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def engine(runner: asyncio.Runner) -> Iterator[AsyncLLM]:
    """On Ray, as by default."""
    found = AsyncLLM(
        TINY_LLAMA,
        device="cpu",
        dtype="float32",
        num_threads=1,
        show_progress=False,
    )
    yield found
    found.shutdown()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm() as found:
        yield found


async def results(engine: AsyncLLM, prompt: str, params: SamplingParams) -> list[Generation]:
    return [result async for result in engine.generate(prompt, params, None)]


def test_results_grow_to_what_llm_returns(
    engine: AsyncLLM, llm: LLM, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1, n=2, seed=5)
    (expected,) = llm.generate(TEXT, params, use_tqdm=False)
    # The engine is at most three steps ahead of the reader.
    may_step = threading.Semaphore(3)
    hold_steps(engine, monkeypatch, lambda: may_step.acquire(timeout=60.0))

    async def read() -> list[Generation]:
        found = []
        async for result in engine.generate(TEXT, params):
            found.append(result)
            may_step.release(3)
        return found

    found = runner.run(read())
    assert [output.token_ids for output in found[-1].outputs] == [
        output.token_ids for output in expected.outputs
    ]
    assert [output.text for output in found[-1].outputs] == [o.text for o in expected.outputs]
    assert found[-1].prompt_token_ids == expected.prompt_token_ids
    assert found[-1].prompt == TEXT
    assert [one.finished for one in found] == [False] * (len(found) - 1) + [True]
    assert len(found) >= 4
    for earlier, later in itertools.pairwise(found):
        for before, after in zip(earlier.outputs, later.outputs, strict=True):
            assert after.text.startswith(before.text)
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert after.logprobs is not None
            assert len(after.logprobs) == len(after.token_ids)


def test_beams_are_those_of_llm(engine: AsyncLLM, llm: LLM, runner: asyncio.Runner) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=10, length_penalty=0.5)

    async def searches() -> list[BeamSearchOutput]:
        # A search beside another one.
        both = (engine.beam_search(TEXT, params), engine.beam_search("import", params))
        return list(await asyncio.gather(*both))

    for found, expected in zip(
        runner.run(searches()), llm.beam_search([TEXT, "import"], params), strict=True
    ):
        assert [one.tokens for one in found.sequences] == [one.tokens for one in expected.sequences]
        assert [one.text for one in found.sequences] == [one.text for one in expected.sequences]
    with pytest.raises(InvalidRequestError, match="takes one prompt"):
        runner.run(engine.beam_search([[5], [6]], params))  # type: ignore[list-item]  # it is rejected


def test_deltas_join_to_the_whole(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    final = SamplingParams(
        temperature=0.0, max_tokens=12, n=2, stop="e", output_kind=RequestOutputKind.FINAL_ONLY
    )
    (whole,) = runner.run(results(engine, TEXT, final))
    delta = SamplingParams(
        temperature=0.0, max_tokens=12, n=2, stop="e", output_kind=RequestOutputKind.DELTA
    )
    parts = runner.run(results(engine, TEXT, delta))
    for output in whole.outputs:
        gained = [one for part in parts for one in part.outputs if one.index == output.index]
        assert "".join(one.text for one in gained) == output.text
        assert sum((one.token_ids for one in gained), ()) == output.token_ids
        assert [one.finish_reason for one in gained[:-1]] == [None] * (len(gained) - 1)
        assert gained[-1].finish_reason == output.finish_reason
        assert gained[-1].stop_reason == output.stop_reason


def test_requests_at_once_share_steps(
    engine: AsyncLLM, llm: LLM, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [f"def function_{index}(value):" for index in range(24)]
    expected = [one.outputs[0].text for one in llm.generate(prompts, GREEDY, use_tqdm=False)]

    async def run() -> list[str]:
        found = await asyncio.gather(*(results(engine, prompt, GREEDY) for prompt in prompts))
        return [one[-1].outputs[0].text for one in found]

    # The engine waits until it has all of them, which may take the event loop long.
    controller = engine._engine
    assert isinstance(controller, EngineLoop)
    submit = controller.submit_request
    has_all = threading.Event()
    num_submitted = 0

    def submit_and_count(request: Request) -> None:
        nonlocal num_submitted
        submit(request)
        num_submitted += 1
        if num_submitted == len(prompts):
            has_all.set()

    monkeypatch.setattr(controller, "submit_request", submit_and_count)
    hold_steps(engine, monkeypatch, lambda: has_all.wait(60.0))
    steps = engine.stats().num_steps
    assert runner.run(run()) == expected
    assert engine.stats().num_steps - steps < 24 * 12 / 2


@pytest.mark.parametrize("request_id", ["", 5, 0, [], b"a"])
def test_other_ids_are_rejected(
    engine: AsyncLLM,
    runner: asyncio.Runner,
    request_id: Any,  # Any: what is wrong
) -> None:
    async def run() -> None:
        async for _ in engine.generate(TEXT, ENDLESS, request_id):
            pass

    with pytest.raises(InvalidRequestError, match="request_id must be a non-empty string, not"):
        runner.run(run())


def test_id_with_a_lone_surrogate_is_rejected(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    with pytest.raises(InvalidRequestError, match="request_id contains a lone surrogate"):
        runner.run(anext(engine.generate(TEXT, ENDLESS, "\ud800")))


def test_calls_that_wait_for_room_take_turns(
    engine: AsyncLLM, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = engine._engine.submit_request
    is_full = True
    submitted: list[int] = []

    def submit_if_room(request: Request) -> None:
        submitted.append(request.prompt_token_ids[0])
        if is_full:
            raise OverloadedError("The queue is full.")
        submit(request)

    async def make_room() -> None:
        nonlocal is_full
        await asyncio.sleep(0.2)
        is_full = False

    async def finish_one(token_id: int) -> None:
        params = SamplingParams(max_tokens=1)
        async for _ in engine.generate([token_id], params):
            pass

    async def finish_all() -> None:
        await asyncio.gather(make_room(), *map(finish_one, range(40)))

    monkeypatch.setattr(engine._engine, "submit_request", submit_if_room)
    runner.run(finish_all())
    # Only the first looks again and again whether there is room.
    assert set(submitted[:-40]) == {0}
    assert submitted[-40:] == list(range(40))


def test_each_of_many_long_texts_is_read_once(
    engine: AsyncLLM, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = engine._requests.make
    num_made = 0

    # Any: its arguments and result.
    async def counted(*arguments: Any) -> Any:
        nonlocal num_made
        num_made += 1
        return await make(*arguments)

    async def finish_all() -> None:
        text = "def read_config(path):\n" * 90
        params = SamplingParams(max_tokens=1)
        await asyncio.gather(*(results(engine, text, params) for _ in range(100)))

    monkeypatch.setattr(engine._requests, "make", counted)
    runner.run(finish_all())
    assert num_made == 100


def test_conversations_are_rendered_as_by_llm(
    engine: AsyncLLM, llm: LLM, runner: asyncio.Runner
) -> None:
    messages = [{"role": "user", "content": "Write a queue."}]
    (expected,) = llm.chat(messages, GREEDY, use_tqdm=False)

    async def run() -> Generation:
        async for result in engine.chat(messages, GREEDY):
            last = result
        return last

    found = runner.run(run())
    assert found.prompt_token_ids == expected.prompt_token_ids
    assert found.outputs[0].text == expected.outputs[0].text


def test_mistakes_are_rejected(engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def first(prompt: object) -> None:
        await anext(engine.generate(prompt, GREEDY))  # type: ignore[arg-type]  # a mistake

    for prompt in ("", ["a", "b"], {"multi_modal_data": 1}):
        with pytest.raises(InvalidRequestError):
            runner.run(first(prompt))
    with pytest.raises(InvalidRequestError, match="event loop"):
        asyncio.run(first(TEXT))

    async def first_with(params: object) -> None:
        await anext(engine.generate(TEXT, params))  # type: ignore[arg-type]  # a mistake

    with pytest.raises(InvalidRequestError, match="sampling_params must be SamplingParams, not"):
        runner.run(first_with({"max_tokens": 4}))
    with pytest.raises(StartupError, match="quantisation"):
        AsyncLLM(TINY_LLAMA, quantisation=None)  # type: ignore[call-arg]  # a mistake


def test_beams_that_no_queue_has_room_for_are_rejected() -> None:
    engine = AsyncLLM(
        TINY_LLAMA, device="cpu", executor="local", max_queued_tokens=64, show_progress=False
    )

    async def run(width: int) -> BeamSearchOutput:
        async with asyncio.timeout(60):
            return await engine.beam_search(
                [5] * 20, BeamSearchParams(beam_width=width, max_tokens=12)
            )

    async def runs() -> None:
        with pytest.raises(InvalidRequestError, match="beam_width 3 has up to 96 tokens"):
            await run(3)
        assert len((await run(2)).sequences) == 2

    asyncio.run(runs())
    engine.shutdown()


def test_shutdown_ends_what_runs() -> None:
    engine = AsyncLLM(TINY_LLAMA, device="cpu", executor="local", show_progress=False)

    async def run() -> None:
        async for _ in engine.generate(TEXT, ENDLESS):
            engine.shutdown()

    with pytest.raises(EngineError, match="engine was shut down"):
        asyncio.run(run())
    with pytest.raises(EngineError, match="AsyncLLM is shut down"):
        asyncio.run(run())
    with pytest.raises(EngineError, match="AsyncLLM is shut down"):
        asyncio.run(engine.check_health())
    engine.shutdown()


def test_public_names_are_shown() -> None:
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutputKind"} <= set(dir(pagedray))


NUM_BLOCKS = 96


@pytest.fixture(scope="module")
def small_engine(runner: asyncio.Runner) -> Iterator[AsyncLLM]:
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


def num_free(small_engine: AsyncLLM) -> int:
    return small_engine.stats().scheduler.num_free_blocks


def wait_until_free(small_engine: AsyncLLM) -> None:
    deadline_s = time.monotonic() + 60.0
    while num_free(small_engine) != NUM_BLOCKS and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert num_free(small_engine) == NUM_BLOCKS


def test_cancelling_a_task_frees_its_blocks(small_engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> int:
        has_begun = asyncio.Event()

        async def read() -> None:
            async for _ in small_engine.generate(TEXT * 8, ENDLESS):
                has_begun.set()

        task = asyncio.create_task(read())
        await has_begun.wait()
        held = NUM_BLOCKS - num_free(small_engine)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return held

    assert runner.run(run()) > 0
    wait_until_free(small_engine)


def test_leaving_the_loop_frees_its_blocks(small_engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> None:
        stream = small_engine.generate(TEXT, ENDLESS, "left")
        async for _ in stream:
            break
        await stream.aclose()
        # The id is free again.
        await anext(again := small_engine.generate(TEXT, ENDLESS, "left"))
        await again.aclose()

    runner.run(run())
    wait_until_free(small_engine)


@pytest.mark.parametrize("request_id", [5, None, b"one", {"one": 1}, ["one", 5]])
def test_abort_of_other_ids_is_rejected(
    small_engine: AsyncLLM,
    runner: asyncio.Runner,
    request_id: Any,  # Any: what is wrong
) -> None:
    async def run() -> Generation:
        stream = small_engine.generate(TEXT, GREEDY, "one")
        await anext(stream)
        with pytest.raises(InvalidRequestError, match="request_id must be a string or several"):
            await small_engine.abort(request_id)
        return [result async for result in stream][-1]

    assert runner.run(run()).outputs[0].finish_reason == "length"


def test_aborted_requests_end_with_a_result(small_engine: AsyncLLM, runner: asyncio.Runner) -> None:
    async def run() -> list[Generation]:
        found = []
        async for result in small_engine.generate(TEXT, ENDLESS, "one"):
            found.append(result)
            with pytest.raises(DuplicateIdError):
                await anext(small_engine.generate(TEXT, ENDLESS, "one"))
            await small_engine.abort(["one", "unknown"])
        return found

    last = runner.run(run())[-1]
    assert (last.request_id, last.outputs[0].finish_reason) == ("one", "abort")
    assert last.finished
    wait_until_free(small_engine)


def test_requests_are_aborted_before_they_begin(
    small_engine: AsyncLLM, runner: asyncio.Runner
) -> None:
    async def run() -> list[Generation]:
        async def read() -> list[Generation]:
            return [result async for result in small_engine.generate(TEXT, ENDLESS, "early")]

        task = asyncio.create_task(read())
        await asyncio.sleep(0)
        await small_engine.abort("early")
        return await task

    (*_, last) = runner.run(run())
    assert last.outputs[0].finish_reason == "abort"
    assert len(last.outputs[0].token_ids) < ENDLESS.max_tokens  # type: ignore[operator]  # not None
    wait_until_free(small_engine)

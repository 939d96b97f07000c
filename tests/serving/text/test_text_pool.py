"""Long texts are processed off the event loop, with a bounded queue."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import grpc
import httpx
import pytest

from cluster.serving.engine_client import EngineClient
from cluster.serving.frontend_options import FrontendOptions
from cluster.serving.frontends import Frontends
from cluster.serving.text.text_pool import TextPool
from pagedray.errors import OverloadedError, ShuttingDownError
from pagedray.v1 import pagedray_pb2 as pb
from pagedray.v1 import pagedray_pb2_grpc
from tests.serving.conftest import engine_config, wait_until
from tests.serving.fake_engine import FakeEngine
from tests.thread_limit import no_more_threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Yield an event that work waits for; it is set at the end, even if the test fails."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
async def pool(gate: threading.Event) -> AsyncIterator[TextPool]:
    pool = TextPool(num_threads=1, max_waiting=2)
    yield pool
    # Closing waits for the work.
    gate.set()
    await pool.close()


async def test_work_is_done_in_a_thread_of_the_pool(pool: TextPool) -> None:
    thread = await pool.run_in_thread("ann", threading.current_thread)
    assert thread.name.startswith("pagedray-text")


async def test_exceptions_of_work_are_raised(pool: TextPool) -> None:
    with pytest.raises(ZeroDivisionError):
        await pool.run_in_thread("ann", lambda: 1 // 0)


async def test_work_is_done_while_no_thread_can_be_started(pool: TextPool) -> None:
    with no_more_threads():
        async with asyncio.timeout(60.0):
            assert await pool.run_in_thread("ann", lambda: "run") == "run"


async def test_waiting_work_is_bounded(pool: TextPool, gate: threading.Event) -> None:
    works = [asyncio.create_task(pool.run_in_thread("ann", gate.wait)) for _ in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError, match="2 long texts of this tenant are waiting"):
        await pool.run_in_thread("ann", gate.wait)
    gate.set()
    assert await asyncio.gather(*works) == [True] * 3
    assert await pool.run_in_thread("ann", gate.wait)


async def test_abandoned_work_keeps_its_thread_until_it_ends(
    pool: TextPool, gate: threading.Event
) -> None:
    has_begun = threading.Event()

    def begin() -> None:
        has_begun.set()
        gate.wait()

    works = [asyncio.create_task(pool.run_in_thread("ann", begin)) for _ in range(3)]
    await wait_until(has_begun.is_set)
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)
    behind = asyncio.create_task(pool.run_in_thread("ann", lambda: "done"))
    await asyncio.sleep(0.01)
    assert not behind.done()
    gate.set()
    assert await behind == "done"


async def test_closed_pool_rejects_waiting_work(pool: TextPool, gate: threading.Event) -> None:
    working = asyncio.create_task(pool.run_in_thread("ann", gate.wait))
    waiting = asyncio.create_task(pool.run_in_thread("ann", gate.wait))
    await asyncio.sleep(0.01)
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0.01)
    gate.set()
    await closing
    assert await working
    with pytest.raises(ShuttingDownError):
        await waiting


async def test_a_tenant_with_a_full_queue_leaves_room_for_others(
    pool: TextPool, gate: threading.Event
) -> None:
    anns = [asyncio.create_task(pool.run_in_thread("ann", gate.wait)) for _ in range(3)]
    await asyncio.sleep(0.01)
    # The first text is given to the threads, and the second waits.
    bens = [asyncio.create_task(pool.run_in_thread("ben", gate.wait)) for _ in range(2)]
    await asyncio.sleep(0.01)
    with pytest.raises(OverloadedError):
        await pool.run_in_thread("ben", gate.wait)
    gate.set()
    assert await asyncio.gather(*anns, *bens) == [True] * 5


async def test_one_tenant_does_not_take_all_threads(gate: threading.Event) -> None:
    pool = TextPool(num_threads=2)
    anns = [asyncio.create_task(pool.run_in_thread("ann", gate.wait)) for _ in range(2)]
    await asyncio.sleep(0.01)
    assert await pool.run_in_thread("ben", lambda: "done") == "done"
    gate.set()
    await asyncio.gather(*anns)
    await pool.close()


def text_threads() -> set[threading.Thread]:
    """Return the threads of all pools, some of which are those of other tests' servers."""
    return {one for one in threading.enumerate() if one.name.startswith("pagedray-text")}


async def test_frontends_reject_long_texts_when_too_many_wait(
    tokenizer: Tokenizer, gate: threading.Event
) -> None:
    client = EngineClient(asyncio.get_running_loop())
    engine = FakeEngine(client, lambda request, index: [72])
    client.attach_engine(engine)
    others = text_threads()
    pool = TextPool(num_threads=1, max_waiting=1)
    assert len(text_threads() - others) == 1
    frontends = Frontends(
        client,
        tokenizer,
        engine_config(),
        FrontendOptions(host="127.0.0.1", grpc_port=0, http_port=0),
        text_pool=pool,
    )
    await frontends.start_servers()
    await frontends.set_ready()
    works = [asyncio.create_task(pool.run_in_thread("", gate.wait)) for _ in range(2)]
    await asyncio.sleep(0.01)
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{frontends.grpc_port}") as channel,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontends.http_port}") as http,
    ):
        stub = pagedray_pb2_grpc.GenerationServiceStub(channel)
        # Too long for the event loop, but short enough to fit the context.
        text = "x" * 3000
        with pytest.raises(grpc.aio.AioRpcError) as rejected:
            await stub.Tokenize(pb.TokenizeRequest(text=text))
        assert rejected.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": text})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    gate.set()
    await asyncio.gather(*works)
    await frontends.stop_servers(0)
    engine.stop()
    await wait_until(lambda: text_threads() <= others)

"""Replicas that do not respond are noticed, and reads of their responses end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from cluster.serving.ray_serve.load_watchdog import Pulse
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError, ReplicaReads
from cluster.serving.ray_serve.router import ReplicaWatch
from cluster.serving.ray_serve.served_replica import Leases
from tests.virtual_time import in_virtual_time, pass_time

if TYPE_CHECKING:
    from collections.abc import Generator


class ReplicaId(NamedTuple):
    unique_id: str


class Replica:
    """A replica that answers unless it hangs."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaId(name)
        self.responds = asyncio.Event()
        self.responds.set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await self.responds.wait()
        return 0


class Result:
    """A streamed response whose items come from a queue, as Serve's handles read it."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Any] = asyncio.Queue()  # Any: items or the end
        self.is_cancelled = False

    async def __anext__(self) -> object:
        item = await self.items.get()
        if item is None:
            raise StopAsyncIteration
        return item

    async def get_async(self) -> object:
        return await self.items.get()

    async def get_rejection_response(self) -> object:
        return await self.items.get()

    def cancel(self) -> None:
        self.is_cancelled = True


def reads_of(result: Result, **options: Any) -> ReplicaReads:  # Any: functions
    return ReplicaReads(result, **options)  # type: ignore[arg-type]  # a stand-in for Serve's


def test_a_replica_is_silent_after_the_limit_and_is_reported_once() -> None:
    pulse = Pulse[str](period_s=1.0, limit_s=3.0)
    reported = [pulse.tick("ab", 1.0) for _ in range(3)]
    pulse.note_answer("b")
    reported += [pulse.tick("ab", 1.0) for _ in range(3)]
    assert reported == [[], [], [], ["a"], [], []]
    assert pulse.silent == {"a"}
    pulse.note_answer("a")
    assert not pulse.silent


def test_a_pause_of_the_watching_process_accuses_no_replica() -> None:
    pulse = Pulse[str](period_s=1.0, limit_s=3.0)
    assert pulse.tick("a", 1000.0) == []
    pulse.note_answer("a")
    assert pulse.tick("a", 1000.0) == []


@in_virtual_time
async def test_a_hanging_replica_is_reported_and_returns() -> None:
    silent: list[str] = []
    watch: Any = ReplicaWatch(  # Any: its replicas are stand-ins
        lambda one: silent.append(one.replica_id.unique_id),
        period_s=0.05,
        limit_s=0.3,
        clock=asyncio.get_running_loop().time,
    )
    well, ill = Replica("well"), Replica("ill")
    ill.responds.clear()
    watch.watch_replicas([well, ill])
    while not silent:
        await asyncio.sleep(0.01)
    assert watch.silent == {ill.replica_id}
    assert well.replica_id not in watch.silent
    ill.responds.set()
    while watch.silent:
        await asyncio.sleep(0.01)
    assert silent == ["ill"]
    watch.watch_replicas([])
    await asyncio.sleep(0.1)
    assert {asyncio.current_task()} == asyncio.all_tasks()


@pytest.mark.parametrize("method", ["__anext__", "get_async", "get_rejection_response"])
async def test_a_failure_ends_the_waiting_read_and_all_later_ones(method: str) -> None:
    result: Any = Result()  # Any: its methods are replaced
    reads = reads_of(result)
    waiting = asyncio.ensure_future(getattr(result, method)())
    await asyncio.sleep(0)
    await asyncio.to_thread(reads.fail, RuntimeError("silent"))
    with pytest.raises(RuntimeError, match="silent"):
        await asyncio.wait_for(waiting, 60.0)
    with pytest.raises(RuntimeError, match="silent"):
        await getattr(result, method)()
    assert result.is_cancelled


async def test_a_reader_that_is_cancelled_stays_cancelled() -> None:
    result: Any = Result()  # Any: see above
    reads = reads_of(result)
    waiting = asyncio.ensure_future(result.__anext__())
    await asyncio.sleep(0)
    waiting.cancel()
    reads.fail(RuntimeError("silent"))
    await asyncio.wait((waiting,))
    assert waiting.cancelled() or waiting.exception() is not None


def test_a_reader_in_a_closed_loop_is_left_alone() -> None:
    class Forever:
        def __await__(self) -> Generator[None, None, object]:
            while True:
                yield None

    class WaitingResult(Result):
        async def __anext__(self) -> object:
            return await Forever()

    result: Any = WaitingResult()  # Any: see above
    reads = reads_of(result)
    loop = asyncio.new_event_loop()
    reader = loop.create_task(result.__anext__())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    reads.fail(RuntimeError("silent"))
    assert result.is_cancelled
    reader.get_coro().close()


async def test_a_cancel_of_serve_is_told_from_those_of_the_replica_and_of_ours() -> None:
    num_noted = 0

    def note() -> None:
        nonlocal num_noted
        num_noted += 1

    class CancelledResult(Result):
        async def __anext__(self) -> object:
            raise asyncio.CancelledError

    cancelled: Any = CancelledResult()  # Any: see above
    reads_of(cancelled, note_cancelled=note)
    with pytest.raises(asyncio.CancelledError):
        await cancelled.__anext__()
    cancelled.cancel()
    rejected: Any = Result()  # Any: see above
    reads_of(rejected, note_accepted=note, note_cancelled=note)
    rejected.cancel()
    failed: Any = Result()  # Any: see above
    reads_of(failed, note_cancelled=note).fail(RuntimeError("silent"))
    assert num_noted == 0
    assert cancelled.is_cancelled
    assert rejected.is_cancelled
    assert failed.is_cancelled
    left: Any = Result()  # Any: see above
    reads_of(left, note_cancelled=note)
    left.cancel()
    assert num_noted == 1
    assert left.is_cancelled


async def test_a_stream_without_its_last_item_raises() -> None:
    for is_complete in (True, False):
        result: Any = Result()  # Any: see above
        reads_of(result, is_last=lambda item: item == "last")
        for item in ("first", *(["last"] if is_complete else []), None):
            result.items.put_nowait(item)
        assert await result.__anext__() == "first"
        if is_complete:
            assert await result.__anext__() == "last"
        with pytest.raises(StopAsyncIteration if is_complete else ReplicaDiedError):
            await result.__anext__()


@in_virtual_time
async def test_a_pause_of_the_replica_ends_no_lease() -> None:
    leases = Leases(1.0, clock=asyncio.get_running_loop().time)

    async def hold() -> None:
        with leases.held("call"):
            await asyncio.sleep(3600.0)

    call = asyncio.create_task(hold())
    await asyncio.sleep(0.02)
    leases.renew({"call"})
    # The process stands still, as after SIGSTOP, for longer than a lease.
    pass_time(1.5)
    await asyncio.sleep(0.1)
    assert not call.done()
    await asyncio.sleep(1.0)
    assert call.cancelled()

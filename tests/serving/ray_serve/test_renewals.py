"""Calls of replicas are renewed, watched, and end with their leases."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from cluster.serving.ray_serve.load_watchdog import Pulse
from cluster.serving.ray_serve.proxied_call import HeldBytes, ProxiedCall
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError, ReplicaReads
from cluster.serving.ray_serve.replica_engine import Leases
from cluster.serving.ray_serve.router import Renewals, ReplicaWatch
from tests.virtual_time import in_virtual_time, pass_time

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from cluster.serving.continuation import Cause

PERIOD_S = 0.02
IDLE_S = 0.1


class Result:
    """A stream of numbers as Serve's handles read it, or the response to a renewal."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self._pause_s = pause_s
        self._number = 0
        self.callbacks: list[Callable[[object], None]] = []

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        self.callbacks.append(callback)

    async def get_async(self) -> None:
        return None

    async def __anext__(self) -> int:
        await asyncio.sleep(self._pause_s)
        return self.__next__()

    def __next__(self) -> int:
        self._number += 1
        return self._number


class Hanging(Result):
    """A response that never arrives."""

    async def get_async(self) -> None:
        await asyncio.Event().wait()


class Replica:
    """Records the calls it is asked to renew."""

    def __init__(self) -> None:
        self.renewed: list[set[str]] = []
        self.is_dead = False
        self.hangs = False

    # Any: the request is Serve's.
    def try_send_request(self, request: Any, *, with_rejection: bool) -> Result:
        if self.is_dead:
            raise RuntimeError("The actor died.")
        assert (request.metadata.call_method, with_rejection) == ("renew", False)
        self.renewed.append(set(request.args[0]))
        return Hanging() if self.hangs else Result()


def renewals() -> Any:  # Any: its arguments are stand-ins for Serve's
    return Renewals(period_s=PERIOD_S, idle_s=IDLE_S)


def reads_of(result: Result) -> ReplicaReads:
    clock = asyncio.get_running_loop().time
    return ReplicaReads(result, clock=clock)  # type: ignore[arg-type]  # a stand-in for Serve's


@in_virtual_time
async def test_streams_that_are_read_are_renewed_at_their_replica() -> None:
    open_streams, replicas = renewals(), [Replica(), Replica()]
    results = [Result(), Result()]
    open_streams.renew_stream(reads_of(results[0]), replicas[0], "a")
    open_streams.renew_stream(reads_of(results[1]), replicas[1], "b")
    for number in range(1, 15):
        # As Serve's handles do, from asyncio or from a thread.
        assert await results[0].__anext__() == number
        assert results[1].__next__() == number
        await asyncio.sleep(PERIOD_S)
    assert len(replicas[0].renewed) > IDLE_S / PERIOD_S
    assert {name for one in replicas[0].renewed for name in one} == {"a"}
    assert {name for one in replicas[1].renewed for name in one} == {"b"}


@in_virtual_time
async def test_streams_with_a_waiting_reader_are_renewed() -> None:
    open_streams, replica, result = renewals(), Replica(), Result(pause_s=10.0)
    open_streams.renew_stream(reads_of(result), replica, "slow")
    waiting = asyncio.ensure_future(result.__anext__())
    await asyncio.sleep(3 * IDLE_S)
    before = len(replica.renewed)
    await asyncio.sleep(IDLE_S)
    assert len(replica.renewed) > before
    # A cancelled read is not a reader.
    waiting.cancel()
    await asyncio.sleep(2 * IDLE_S)
    before = len(replica.renewed)
    await asyncio.sleep(2 * IDLE_S)
    assert len(replica.renewed) == before


@in_virtual_time
async def test_unread_streams_are_not_renewed() -> None:
    open_streams, replica, read, dropped = renewals(), Replica(), Result(), Result()
    open_streams.renew_stream(reads_of(read), replica, "read")
    open_streams.renew_stream(reads_of(dropped), replica, "dropped")
    await asyncio.sleep(2 * PERIOD_S)
    assert replica.renewed[0] == {"read", "dropped"}
    del dropped
    for _ in range(10):
        await read.__anext__()
        await asyncio.sleep(PERIOD_S)
    assert replica.renewed[-1] == {"read"}


@in_virtual_time
async def test_renewals_stop_when_all_streams_have_ended() -> None:
    open_streams, replica, result = renewals(), Replica(), Result()
    open_streams.renew_stream(reads_of(result), replica, "first")
    for callback in result.callbacks:
        # As Ray does, in another thread.
        thread = threading.Thread(target=callback, args=(None,))
        thread.start()
        thread.join()
    await asyncio.sleep(3 * PERIOD_S)
    assert replica.renewed == []
    assert [one for one in asyncio.all_tasks() if one is not asyncio.current_task()] == []
    second = Result()
    open_streams.renew_stream(reads_of(second), replica, "second")
    await asyncio.sleep(3 * PERIOD_S)
    assert replica.renewed[0] == {"second"}


@in_virtual_time
async def test_a_dead_replica_does_not_block_renewals_at_others() -> None:
    open_streams, replicas = renewals(), [Replica(), Replica()]
    replicas[0].is_dead = True
    results = [Result(), Result()]
    for name, replica, result in zip("ab", replicas, results, strict=True):
        open_streams.renew_stream(reads_of(result), replica, name)
    await asyncio.sleep(4 * PERIOD_S)
    assert len(replicas[1].renewed) > 1


@in_virtual_time
async def test_a_hanging_replica_does_not_block_renewals_at_others() -> None:
    open_streams, replicas = renewals(), [Replica(), Replica()]
    replicas[0].hangs = True
    results = [Result(), Result()]
    for name, replica, result in zip("ab", replicas, results, strict=True):
        open_streams.renew_stream(reads_of(result), replica, name)
    for _ in range(8):
        await results[0].__anext__()
        await results[1].__anext__()
        await asyncio.sleep(PERIOD_S)
    # If one waited for the other, it would be renewed half as often: a response may take a period.
    assert len(replicas[1].renewed) >= 5
    # It is asked again nevertheless.
    assert len(replicas[0].renewed) >= 5


class ReplicaId(NamedTuple):
    unique_id: str


class WatchReplica:
    """A replica that answers unless it hangs."""

    def __init__(self, name: str) -> None:
        self.replica_id = ReplicaId(name)
        self.responds = asyncio.Event()
        self.responds.set()

    async def get_queue_len(self, *, deadline_s: float) -> int:
        await self.responds.wait()
        return 0


class WatchResult:
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


def watch_reads_of(result: WatchResult, **options: Any) -> ReplicaReads:  # Any: functions
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
    well, ill = WatchReplica("well"), WatchReplica("ill")
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
    result: Any = WatchResult()  # Any: its methods are replaced
    reads = watch_reads_of(result)
    waiting = asyncio.ensure_future(getattr(result, method)())
    await asyncio.sleep(0)
    await asyncio.to_thread(reads.fail, RuntimeError("silent"))
    with pytest.raises(RuntimeError, match="silent"):
        await asyncio.wait_for(waiting, 60.0)
    with pytest.raises(RuntimeError, match="silent"):
        await getattr(result, method)()
    assert result.is_cancelled


async def test_a_reader_that_is_cancelled_stays_cancelled() -> None:
    result: Any = WatchResult()  # Any: see above
    reads = watch_reads_of(result)
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

    class WaitingResult(WatchResult):
        async def __anext__(self) -> object:
            return await Forever()

    result: Any = WaitingResult()  # Any: see above
    reads = watch_reads_of(result)
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

    class CancelledResult(WatchResult):
        async def __anext__(self) -> object:
            raise asyncio.CancelledError

    cancelled: Any = CancelledResult()  # Any: see above
    watch_reads_of(cancelled, note_cancelled=note)
    with pytest.raises(asyncio.CancelledError):
        await cancelled.__anext__()
    cancelled.cancel()
    rejected: Any = WatchResult()  # Any: see above
    watch_reads_of(rejected, note_accepted=note, note_cancelled=note)
    rejected.cancel()
    failed: Any = WatchResult()  # Any: see above
    watch_reads_of(failed, note_cancelled=note).fail(RuntimeError("silent"))
    assert num_noted == 0
    assert cancelled.is_cancelled
    assert rejected.is_cancelled
    assert failed.is_cancelled
    left: Any = WatchResult()  # Any: see above
    watch_reads_of(left, note_cancelled=note)
    left.cancel()
    assert num_noted == 1
    assert left.is_cancelled


async def test_a_stream_without_its_last_item_raises() -> None:
    for is_complete in (True, False):
        result: Any = WatchResult()  # Any: see above
        watch_reads_of(result, is_last=lambda item: item == "last")
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


# Half of the lease passes without a renewal.
LEASE_S = 0.4


def timed_leases() -> Leases:
    """Return leases on the clock of the event loop."""
    return Leases(LEASE_S, clock=asyncio.get_running_loop().time)


async def run(leases: Leases, call_id: str | None) -> None:
    with leases.held(call_id):
        await asyncio.sleep(3600.0)


async def after(duration_s: float, every_step: Callable[[], None] = lambda: None) -> None:
    for _ in range(10):
        every_step()
        await asyncio.sleep(duration_s / 10)


@in_virtual_time
async def test_a_call_ends_when_its_lease_expires() -> None:
    leases = timed_leases()
    kept, lost = (asyncio.create_task(run(leases, name)) for name in ("kept", "lost"))
    await after(1.5 * LEASE_S, lambda: leases.renew({"kept"}))
    assert lost.cancelled()
    assert not kept.done()
    # The renewing process is gone.
    await after(1.5 * LEASE_S)
    assert kept.cancelled()


@in_virtual_time
async def test_calls_of_one_id_are_renewed_together() -> None:
    leases = timed_leases()
    calls = [asyncio.create_task(run(leases, "same")) for _ in range(2)]
    await after(1.5 * LEASE_S, lambda: leases.renew({"same"}))
    assert not any(call.done() for call in calls)
    for call in calls:
        call.cancel()


@in_virtual_time
async def test_calls_continue_if_no_lease_was_ever_renewed() -> None:
    leases = timed_leases()
    call = asyncio.create_task(run(leases, "old"))
    await after(1.5 * LEASE_S)
    assert not call.done()
    call.cancel()


@in_virtual_time
async def test_a_call_that_has_ended_is_left_alone() -> None:
    leases = timed_leases()
    leases.renew(())
    with leases.held("short"):
        await asyncio.sleep(0)
    # The task outlives its call and must not be cancelled.
    await after(1.5 * LEASE_S)


@in_virtual_time
async def test_a_call_begins_with_a_whole_lease() -> None:
    leases = timed_leases()
    leases.renew(())
    first = asyncio.create_task(run(leases, "first"))
    await after(0.4 * LEASE_S)
    second = asyncio.create_task(run(leases, "second"))
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not second.done()
    with pytest.raises(asyncio.CancelledError):
        await second


@in_virtual_time
async def test_a_task_without_an_id_has_no_lease() -> None:
    leases = timed_leases()
    leases.renew(())
    life = asyncio.create_task(run(leases, None))
    await after(1.5 * LEASE_S)
    assert not life.done()
    life.cancel()


async def is_accepted(cause: Cause, after_s: float) -> bool:
    """Return whether a call that lost its replica goes on with one that accepts it then."""
    call = ProxiedCall(HeldBytes())
    async with call.sending():
        call.note_sent("one", may_continue=True)
    assert call.continues_after(cause)
    try:
        async with call.sending():
            await asyncio.sleep(after_s)
            call.note_accepted()
            # Its first token takes as long as that of any call.
            await asyncio.sleep(30.0)
    except TimeoutError:
        return False
    return True


@in_virtual_time
async def test_a_call_outlasts_a_pause_of_the_replica_that_is_left() -> None:
    assert await is_accepted("died", after_s=8.5)


@pytest.mark.parametrize(("cause", "after_s"), [("died", 15.0), ("hung", 8.0)])
@in_virtual_time
async def test_a_call_that_no_replica_accepts_ends(cause: Cause, after_s: float) -> None:
    assert not await is_accepted(cause, after_s)

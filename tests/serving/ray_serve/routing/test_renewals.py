"""A caller's process renews the streams that are being read."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from cluster.serving.ray_serve.replica_calls import ReplicaReads
from cluster.serving.ray_serve.router import Renewals
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import Callable

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

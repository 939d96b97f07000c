"""Routes Ray Serve's requests to replicas by session, by prefix and by load.

It runs in Serve's proxies and in every process with a handle. The loads it knows are up to a second
old, so it adds the requests that it has sent since.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import time
import uuid
from contextvars import Context
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.request_router import RequestRouter, RunningReplica

from cluster.serving.ray_serve.load_watchdog import Pulse
from cluster.serving.ray_serve.placement import (
    DEFAULT_CALL_LOAD,
    DEFAULT_CALM,
    DEFAULT_SLACK,
    Owners,
    Placement,
    RoutingKey,
    prefix_key,
)
from cluster.serving.ray_serve.proxied_call import HeldBytes, ProxiedCall, current_call
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError, ReplicaReads, call_replica
from cluster.serving.text.template_arguments import ChatPrompt
from pagedray.errors import EngineError
from pagedray.sampling_params import MAX_N

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ray.serve._private.common import ReplicaID, ReplicaQueueLengthInfo, RunningReplicaInfo
    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.request_router import PendingRequest

    from cluster.serving.continuation import Cause
    from cluster.serving.servicer import GenerationOutput

__all__ = ["AffinityRouter", "HandleRequest", "HandleStream", "Renewals", "ReplicaWatch"]

logger = logging.getLogger(__name__)

_RENEWALS_PER_LEASE = 6
_REJECTED_PAUSE_S = 0.05
_PERIOD_S = 1.0
_LIMIT_S = 7.0
"""A shorter pause of a replica's process does not matter."""


class AffinityRouter(RequestRouter):
    """Sends requests of one session or with one prefix to one replica while its load allows."""

    def initialize_state(  # type: ignore[override]  # Serve passes keywords
        self,
        *,
        lease_s: float,
        continues_calls: bool,
        slack: float = DEFAULT_SLACK,
        calm: float = DEFAULT_CALM,
        call_load: float = DEFAULT_CALL_LOAD,
    ) -> None:
        """Take the deployment's settings; loads are fractions of a replica's cache.

        A key may use replicas with a load of `slack` times the mean, or of `calm`. `call_load` is
        assumed for a request that the replica has not reported yet. A stream that is not read for
        `lease_s` is cancelled. `continues_calls` lets proxies and handles continue the calls of a
        replica that died or does not respond on another one.
        """
        self._call_load = call_load
        self._placement = Placement(slack=slack, calm=calm, draws=random.Random())
        self._owners = Owners()
        self._candidates: list[RunningReplica] = []
        """The list of Serve from which the placement was made; Serve replaces it by another."""
        self._silent: frozenset[ReplicaID] = frozenset()
        self._by_name: dict[str, RunningReplica] = {}
        self._loads: dict[ReplicaID, tuple[float, float]] = {}
        self._num_sent: dict[ReplicaID, int] = {}
        self._continues_calls = continues_calls
        self._watch = ReplicaWatch(_leave)
        self._renewals = Renewals(period_s=lease_s / _RENEWALS_PER_LEASE, idle_s=lease_s)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Take the current replicas and the loads that they report."""
        loads = {one.replica_id: _reported_load(one) for one in replicas}
        # A new report includes the requests that were sent before.
        self._num_sent = {
            one: count
            for one, count in self._num_sent.items()
            if loads.get(one) == self._loads[one]
        }
        self._loads = loads
        self._watch.watch_replicas(replicas)
        super().update_replicas(replicas)

    def create_replica_wrapper(self, replica_info: RunningReplicaInfo) -> RunningReplica:
        """Return a wrapper that renews the leases of the replica's streams."""
        return _LeasingReplica(
            replica_info,
            self._renewals,
            send_elsewhere=self._send_elsewhere if self._continues_calls else None,
        )

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return some candidates in the order in which to try them, one in each list.

        Unresponsive replicas are left out; Serve asks again if none accepts the request.
        """
        if pending_request is not None:
            # Without this Serve asks again at once, forever if no replica responds. That blocks
            # the event loop, on which replicas are found to respond again.
            pending_request.routing_context.should_backoff = True
        if candidate_replicas is not self._candidates or self._watch.silent is not self._silent:
            self._place(candidate_replicas)
        names = self._placement.choose_replicas(self._key(pending_request))
        return [[self._by_name[name]] for name in names]

    def _place(self, candidates: list[RunningReplica]) -> None:
        self._candidates, self._silent = candidates, self._watch.silent
        self._by_name = {
            one.replica_id.unique_id: one
            for one in candidates
            if one.replica_id not in self._silent
        }
        self._placement.set_replicas(
            {name: self._load(one.replica_id) for name, one in self._by_name.items()}
        )

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Count a request that was sent to a replica."""
        if replica_id in self._loads:
            self._num_sent[replica_id] = self._num_sent.get(replica_id, 0) + 1
            self._placement.add_load(replica_id.unique_id, self._call_load)

    async def _send_elsewhere(self, request: HandleRequest) -> ReplicaResult:
        """Send a handle's request to a replica that accepts it, as Serve does at first."""
        while True:
            pending = request.continued()
            replica = await self._choose_replica_for_request(pending)
            try:
                result = replica.try_send_request(pending, with_rejection=True)
                answer = await _answer_of(result)
            except ActorDiedError:
                self.on_replica_actor_died(replica.replica_id)
                continue
            except ActorUnavailableError:
                self.on_replica_actor_unavailable(replica.replica_id)
                continue
            if answer is not None:
                self.on_new_queue_len_info(replica.replica_id, answer.num_ongoing_requests)
                if answer.accepted:
                    self.on_request_routed(pending, replica.replica_id, result)
                    return result
            result.cancel()
            await asyncio.sleep(_REJECTED_PAUSE_S)

    def _load(self, replica_id: ReplicaID) -> float:
        load, _ = self._loads.get(replica_id, (0.0, 0.0))
        return load + self._num_sent.get(replica_id, 0) * self._call_load

    def _key(self, request: PendingRequest | None) -> RoutingKey | None:
        """Return the key that a request shares with requests for the same replica."""
        if request is None:
            return None
        metadata = request.metadata
        if metadata.session_id:
            return RoutingKey.of_session_id(str(metadata.session_id))
        is_proxied = metadata.is_http_request or metadata.is_grpc_request
        if is_proxied or metadata.call_method != "generate":
            return None
        prompt = request.kwargs.get("prompt", request.args[0] if request.args else None)
        if isinstance(prompt, ChatPrompt):
            prompt = prompt.messages
        # The replica rejects others.
        text = prefix_key(prompt) if isinstance(prompt, str | list | tuple) else None
        if text is None:
            return None
        credential = request.kwargs.get("key")
        return RoutingKey(
            text, self._owners.owner_of(None if credential is None else str(credential))
        )


class _LeasingReplica(RunningReplica):
    """A replica with renewed leases of streams, and with calls that end when it hangs."""

    def __init__(
        self,
        replica_info: RunningReplicaInfo,
        renewals: Renewals,
        *,
        send_elsewhere: Callable[[HandleRequest], Awaitable[ReplicaResult]] | None,
    ) -> None:
        """`send_elsewhere` is None if calls do not continue on other replicas."""
        super().__init__(replica_info)
        self._renewals = renewals
        self._send_elsewhere = send_elsewhere
        self._open: WeakKeyDictionary[ReplicaReads, ProxiedCall | None] = WeakKeyDictionary()

    def try_send_request(self, pr: PendingRequest, with_rejection: bool) -> ReplicaResult:
        """Send a request, and renew the lease of its stream."""
        call, begun = current_call(), None
        if call is None and self._send_elsewhere is not None and generates(pr):
            begun = HandleRequest(pr)
            begun.set_continuation()
            call = begun.call
        result = super().try_send_request(pr, with_rejection)
        note_accepted = None
        if call is not None:
            name = self.replica_id.unique_id
            call.note_sent(name, may_continue=self._send_elsewhere is not None)
            if with_rejection:
                note_accepted = call.note_accepted
            else:
                call.note_accepted()
        reads = ReplicaReads(
            result,
            note_accepted,
            None if call is None else call.note_cancelled,
            _is_last if generates(pr) else None,
        )
        self._open[reads] = call
        if pr.metadata.is_streaming:
            self._renewals.renew_stream(reads, self, pr.metadata.internal_request_id)
        if begun is not None and self._send_elsewhere is not None:
            HandleStream(result, begun, self._send_elsewhere)
        return result

    def fail_calls(self) -> None:
        """End all open calls with an error, after which Serve or the proxy sends them elsewhere."""
        for reads, call in list(self._open.items()):
            if call is not None:
                call.note_hung()
            reads.fail(
                ActorUnavailableError("The replica does not respond.", self.actor_id.binary())
            )


async def _answer_of(result: ReplicaResult) -> ReplicaQueueLengthInfo | None:
    """Return whether a replica accepts a request, which is cancelled with this."""
    try:
        return await result.get_rejection_response()
    except asyncio.CancelledError:
        result.cancel()
        raise


def _is_last(output: GenerationOutput) -> bool:
    return output.is_last


def _leave(replica: RunningReplica) -> None:
    assert isinstance(replica, _LeasingReplica)
    replica.fail_calls()


def _reported_load(replica: RunningReplica) -> tuple[float, float]:
    """Return the last load that a replica reported, and when it did."""
    stats = replica.routing_stats
    return float(stats.get("load", 0.0)), float(stats.get("reported_s", 0.0))


class Renewals:
    """The open streams of one router. Used from the router's event loop only."""

    def __init__(self, *, period_s: float, idle_s: float) -> None:
        """Streams are renewed every `period_s` unless they have not been read for `idle_s`."""
        self._period_s = period_s
        self._idle_s = idle_s
        self._open: dict[ReplicaReads, tuple[RunningReplica, str]] = {}
        self._task: asyncio.Task[None] | None = None
        self._renewals: set[asyncio.Task[None]] = set()

    def renew_stream(self, reads: ReplicaReads, replica: RunningReplica, call_id: str) -> None:
        """Renew a stream until it ends or is no longer read."""
        loop = asyncio.get_running_loop()
        self._open[reads] = replica, call_id

        def forget(_: object) -> None:
            # Ray calls this in its own thread, also when the event loop is closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._open.pop, reads, None)

        reads.result.add_done_callback(forget)
        if self._task is None or self._task.done():
            # In a context of its own, since this is that of one of many requests.
            self._task = asyncio.create_task(self._renew_on(), context=Context())

    async def _renew_on(self) -> None:
        while self._open:
            await asyncio.sleep(self._period_s)
            read: dict[RunningReplica, list[str]] = {}
            for reads, (replica, call_id) in self._open.items():
                if reads.idle_s() < self._idle_s:
                    read.setdefault(replica, []).append(call_id)
            # In tasks: a replica that does not answer must not delay the others.
            for replica, call_ids in read.items():
                renewal = asyncio.create_task(self._renew(replica, call_ids))
                self._renewals.add(renewal)
                renewal.add_done_callback(self._renewals.discard)

    async def _renew(self, replica: RunningReplica, call_ids: list[str]) -> None:
        try:
            await asyncio.wait_for(call_replica(replica, "renew", call_ids), self._period_s)
        except Exception as error:
            # If the replica died, its callers get an error; otherwise the next renewal suffices.
            logger.debug("Could not renew the leases of calls to %s: %s", replica, error)


class ReplicaWatch:
    """Watches the replicas of one router. Used from the router's event loop only."""

    def __init__(
        self,
        note_silent: Callable[[RunningReplica], None],
        *,
        period_s: float = _PERIOD_S,
        limit_s: float = _LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`note_silent` is called when a replica has not responded for `limit_s`."""
        self._note_silent = note_silent
        self._period_s = period_s
        self._clock = clock
        self._pulse = Pulse["ReplicaID"](period_s=period_s, limit_s=limit_s)
        self._replicas: dict[ReplicaID, RunningReplica] = {}
        self._pings: dict[ReplicaID, asyncio.Task[None]] = {}
        self._ticked_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def watch_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Watch these replicas instead of the previous replicas."""
        self._replicas = {one.replica_id: one for one in replicas}
        for replica_id in self._pings.keys() - self._replicas.keys():
            self._pings.pop(replica_id).cancel()
        if self._replicas and (self._task is None or self._task.done()):
            self._ticked_s = self._clock()
            # In a context of its own, since this may be called in that of any request.
            self._task = asyncio.create_task(_tick_on(ref(self), self._period_s), context=Context())

    @property
    def silent(self) -> frozenset[ReplicaID]:
        """The replicas that do not respond; another object when they change."""
        return self._pulse.silent

    def tick(self) -> bool:
        """Report silent replicas and ask all again; return whether there are any replicas."""
        now_s = self._clock()
        elapsed_s, self._ticked_s = now_s - self._ticked_s, now_s
        for replica_id in self._pulse.tick(self._replicas.keys(), elapsed_s):
            logger.warning("Replica %s does not respond; avoiding it.", replica_id.unique_id)
            self._note_silent(self._replicas[replica_id])
        for replica_id, replica in self._replicas.items():
            ping = self._pings.get(replica_id)
            # An unanswered question is answered when the replica responds again.
            if ping is None or ping.done():
                self._pings[replica_id] = asyncio.create_task(self._ping(replica))
        return bool(self._replicas)

    async def _ping(self, replica: RunningReplica) -> None:
        try:
            await replica.get_queue_len(deadline_s=self._period_s)
        except Exception as error:
            logger.debug("Could not reach %s: %s", replica.replica_id, error)
            return
        if replica.replica_id in self._pulse.silent:
            logger.warning("Replica %s responds again.", replica.replica_id.unique_id)
        self._pulse.note_answer(replica.replica_id)


async def _tick_on(watch: ref[ReplicaWatch], period_s: float) -> None:
    while True:
        await asyncio.sleep(period_s)
        watching = watch()
        if watching is None or not watching.tick():
            return
        # A router that is no longer used is not kept alive.
        del watching


def generates(request: PendingRequest) -> bool:
    """Return whether a program with a handle requests a stream of tokens."""
    metadata = request.metadata
    is_plain = not (metadata.is_http_request or metadata.is_grpc_request)
    return is_plain and metadata.is_streaming and metadata.call_method == "generate"


class HandleRequest:
    """A request for a stream of tokens, which several replicas may get one after another."""

    def __init__(self, request: PendingRequest) -> None:
        # The program holds the prompt itself, so the bytes are bounded for each call alone.
        self.call = ProxiedCall(HeldBytes())
        sampling = request.kwargs.get("sampling", request.args[1] if request.args[1:] else None)
        self.call.num_sequences = _num_sequences(sampling)
        self._request = request
        timeout_s = request.kwargs.get("timeout_s")
        self._deadline_s: float | None = None
        if isinstance(timeout_s, int | float):
            self._deadline_s = time.monotonic() + timeout_s

    def set_continuation(self) -> None:
        """Send the first replica the data that keeps the call the same in any replica."""
        self._request.kwargs["continuation"] = self.call.continuation()

    def continued(self) -> PendingRequest:
        """Return the request that continues the call, for another replica."""
        request = copy.copy(self._request)
        request.kwargs = {**request.kwargs, "continuation": self.call.continuation()}
        if self._deadline_s is not None:
            # The replica reports a deadline that has passed.
            request.kwargs["timeout_s"] = max(self._deadline_s - time.monotonic(), 1e-6)
        request.metadata = copy.copy(request.metadata)
        request.metadata.internal_request_id = str(uuid.uuid4())
        request.routing_context = type(request.routing_context)()
        request.created_at = time.time()
        request.reset_future()
        return request


class HandleStream:
    """The reads of one stream, whichever replica it comes from."""

    def __init__(
        self,
        result: ReplicaResult,
        request: HandleRequest,
        send: Callable[[HandleRequest], Awaitable[ReplicaResult]],
    ) -> None:
        """Replace the methods of `result`; `send` sends the request to another replica.

        It runs on the current event loop, which is the router's.
        """
        self._request = request
        self._call = request.call
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._later: ReplicaResult | None = None
        """The response of a later replica, kept here; the program keeps the first response."""
        self._anext_now: Callable[[], Awaitable[Any]] = result.__anext__
        self._next_now: Callable[[], Any] = result.__next__  # Any: a response of Serve
        self._cancel_now: Callable[[], None] = result.cancel
        # Serve's handles call these on the instance.
        result.__anext__ = self._anext  # type: ignore[method-assign]  # see above
        result.__next__ = self._next  # type: ignore[method-assign]  # see above
        result.cancel = self._cancel  # type: ignore[method-assign]  # see above

    async def _anext(self) -> GenerationOutput:
        while True:
            try:
                return self._noted(await self._anext_now())
            except (ActorDiedError, ActorUnavailableError, EngineError) as error:
                if self._call.is_complete:
                    raise StopAsyncIteration from None
                self._take(await asyncio.wrap_future(self._sending(error)), error)

    def _next(self) -> GenerationOutput:
        while True:
            try:
                return self._noted(self._next_now())
            except (ActorDiedError, ActorUnavailableError, EngineError) as error:
                if self._call.is_complete:
                    raise StopIteration from None
                self._take(self._sending(error).result(), error)

    def _noted(self, output: Any) -> GenerationOutput:  # Any: a response of Serve
        found: GenerationOutput = output
        self._call.note_cached_tokens(found.usage.num_cached_tokens)
        self._call.add_tokens(
            [(one.index, one.token_ids, one.finish_reason is not None) for one in found.sequences]
        )
        self._call.is_complete = found.is_last
        return found

    def _sending(self, error: Exception) -> Any:  # Any: a future of either library
        """Return the future of the next replica's response. Raises `error` if there is none."""
        if not self._call.continues_after(_cause_of(error)):
            raise error
        return asyncio.run_coroutine_threadsafe(self._sent(), self._loop)

    async def _sent(self) -> ReplicaResult | None:
        try:
            async with self._call.sending():
                return await self._send(self._request)
        except TimeoutError:
            return None

    def _take(self, result: ReplicaResult | None, error: Exception) -> None:
        if result is None:
            raise error
        self._later = result
        self._anext_now, self._next_now = result.__anext__, result.__next__
        self._cancel_now = result.cancel
        if self._call.is_cancelled:
            result.cancel()

    def _cancel(self) -> None:
        self._call.note_cancelled()
        self._cancel_now()


def _cause_of(error: Exception) -> Cause:
    if isinstance(error, ReplicaDiedError):
        return "truncated"
    return "failed" if isinstance(error, EngineError) else "died"


def _num_sequences(sampling: Any) -> int:  # Any: the program's own
    n = sampling.get("n", 1) if hasattr(sampling, "get") else getattr(sampling, "n", 1)
    # The replica rejects others.
    return n if isinstance(n, int) and 0 < n <= MAX_N else 1

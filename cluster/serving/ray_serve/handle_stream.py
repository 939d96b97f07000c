"""Streams of Python handles, which continue with another replica when theirs fails.

A handle's program reads its stream from Serve's own objects, so their methods are replaced. This
uses private parts of Serve.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorDiedError, ActorUnavailableError

from cluster.serving.ray_serve.proxied_call import HeldBytes, ProxiedCall
from cluster.serving.ray_serve.replica_calls import ReplicaDiedError
from pagedray.errors import EngineError
from pagedray.sampling_params import MAX_N

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ray.serve._private.replica_result import ReplicaResult
    from ray.serve.request_router import PendingRequest

    from cluster.serving.continuation import Cause
    from cluster.serving.servicer import GenerationOutput

__all__ = ["HandleRequest", "HandleStream", "generates"]


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

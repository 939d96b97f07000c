"""A client's call in a proxy: its progress, and whether another replica may continue.

The proxy's handlers own it; the router, in another thread of the same process, finds it in the
context of the request that it routes. It knows no protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from array import array
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple

from cluster.serving.continuation import Continuation, SequenceProgress

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from starlette.types import Message, Receive, Scope

    from cluster.serving.continuation import Cause, Progress

__all__ = [
    "BODY_KEY",
    "TIMEOUT_KEY",
    "ProxiedCall",
    "ProxiedMessage",
    "current_call",
    "receive_carried",
]

logger = logging.getLogger(__name__)

_MAX_CONTINUATIONS = 3
_MAX_AGE_S = 3600.0
_PROBE_WAIT_S = 5.0
"""How long a probe may wait until a replica accepts it."""
_LOST_WAIT_S = 12.0
"""How long a call may wait for another replica after its own was lost, so that a pause of that one
costs no call. Clients get an error within 15 seconds."""
_HUNG_WAIT_S = 5.0
"""The wait after a replica hung, which took a few seconds to detect."""
_current: ContextVar[ProxiedCall | None] = ContextVar("_current", default=None)
_MAX_HELD_BYTES = 256 * 2**20

BODY_KEY = "pagedray.body"
"""The key of the whole body in the ASGI scope, which clients cannot set."""
TIMEOUT_KEY = "pagedray-timeout-ms"
"""The metadata key of a call's remaining time, which Serve does not pass to replicas."""


def current_call() -> ProxiedCall | None:
    """Return the call that the current task sends to a replica, if a proxy's extension sends it."""
    return _current.get()


class ProxiedCall:
    """One call, sent to one replica after another until its response is complete.

    `note_sent`, `note_accepted`, `note_cancelled` and `note_hung` are called by the router.
    """

    def __init__(self, held: HeldBytes, *, is_probe: bool = False) -> None:
        """`is_probe` means that no replica must be waited for when the call begins."""
        self._held = HeldCall(held)
        self._is_probe = is_probe
        self._call_id = secrets.token_hex(16)
        self._seed = secrets.randbits(63)
        self._created_s = int(time.time())
        self._begun_s = time.monotonic()
        self.num_sequences = 1
        self.num_events = 0
        """Events that the client has received, if it receives any."""
        self._num_cached_tokens = 0
        self._num_continuations = 0
        self._cause: Cause | None = None
        self._is_hung = False
        self._is_accepted = False
        self._may_continue = False
        self._replica = self._first_replica = ""
        self._timeout: asyncio.Timeout | None = None
        self._loop = asyncio.get_running_loop()
        self.is_ours = False
        """Whether it is routed to replicas of ours."""
        self.is_cancelled = False
        """Whether Serve cancelled it: its client has disconnected, or Serve's time limit passed."""
        self.is_complete = False
        """Whether the usage was sent, after which only the end of the response may be missing."""

    def hold(self, num_bytes: int) -> None:
        """Hold bytes of the request until `close`."""
        self._held.hold(num_bytes)

    def forgo_continuation(self) -> None:
        """Never continue the call: the client's part of the response cannot be continued."""
        self._held.forgo()

    def close(self) -> None:
        """Release the call's resources."""
        self._held.release()

    def add_progress(self, progress: Progress) -> None:
        """Record the progress by a message to the client."""
        self.num_sequences = progress.num_sequences
        self._first_replica = self._first_replica or self._replica
        self.add_tokens(progress.sequences)
        self._num_cached_tokens = progress.num_cached_tokens
        self.is_complete = self.is_complete or progress.is_last

    def add_tokens(self, sequences: Iterable[tuple[int, Sequence[int], bool]]) -> None:
        """Record tokens that the client receives."""
        self._held.add_tokens(sequences)

    def note_cached_tokens(self, number: int) -> None:
        """Record the prompt tokens that the first replica found in its cache."""
        self._num_cached_tokens = number

    def continuation(self) -> Continuation:
        """Return the data for a replica to continue the call from its progress."""
        sequences = tuple(self._held.sequence(number) for number in range(self.num_sequences))
        has_tokens = any(one.token_ids for one in sequences)
        return Continuation(
            call_id=self._call_id,
            seed=self._seed,
            created_s=self._created_s,
            age_s=time.monotonic() - self._begun_s,
            cause=self._cause,
            replica=self._first_replica,
            num_cached_tokens=self._num_cached_tokens,
            sequences=sequences if has_tokens else (),
            num_events=self.num_events,
        )

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send the call in this block, which is cancelled if no replica accepts it in time.

        The wait is limited for probes, and after a replica was lost. Raises TimeoutError.
        """
        token = _current.set(self)
        self._is_hung = self._is_accepted = self._may_continue = False
        try:
            async with asyncio.timeout(self._wait_s()) as timeout:
                self._timeout = timeout
                yield
            if timeout.expired():
                # Serve swallowed the cancellation.
                raise TimeoutError
        finally:
            self._timeout = None
            _current.reset(token)

    def continues_after(self, cause: Cause) -> bool:
        """Return whether to send the call to another replica, and count that."""
        if self._is_hung:
            cause = "hung"
        is_young = time.monotonic() - self._begun_s < _MAX_AGE_S
        if self.is_cancelled or not (self._may_continue and self._held.is_complete and is_young):
            return False
        if self._num_continuations >= _MAX_CONTINUATIONS:
            logger.warning("Ending a call that was continued %d times.", _MAX_CONTINUATIONS)
            return False
        self._num_continuations += 1
        self._cause = cause
        return True

    def note_sent(self, replica: str, *, may_continue: bool) -> None:
        """Record which replica gets the call, and whether the deployment continues calls."""
        self.is_ours = True
        self._replica = replica
        self._may_continue = may_continue

    def note_accepted(self) -> None:
        """Record that the replica has the call; the first token may take long."""
        self._is_hung, self._is_accepted = False, True
        self._loop.call_soon_threadsafe(self._reschedule, None)

    def note_cancelled(self) -> None:
        """Record that Serve cancelled the call."""
        self.is_cancelled = True

    def note_hung(self) -> None:
        """Record that the replica does not respond.

        If it has not accepted the call, Serve asks others, one of which must accept it soon.
        """
        self._is_hung = True
        if not self._is_accepted:
            self._loop.call_soon_threadsafe(self._reschedule, _HUNG_WAIT_S)

    def _wait_s(self) -> float | None:
        if self._is_probe:
            return _PROBE_WAIT_S
        if self._cause is None:
            return None
        return _HUNG_WAIT_S if self._cause == "hung" else _LOST_WAIT_S

    def _reschedule(self, delay_s: float | None) -> None:
        timeout = self._timeout
        if timeout is None or timeout.expired():
            return
        # It may be expiring or ending.
        with contextlib.suppress(RuntimeError):
            timeout.reschedule(None if delay_s is None else self._loop.time() + delay_s)


class HeldBytes:
    """The bytes that all calls of a proxy hold to continue elsewhere."""

    def __init__(self) -> None:
        self.number = 0

    def take(self, number: int) -> bool:
        """Count more bytes, if there is room."""
        if self.number + number > _MAX_HELD_BYTES:
            return False
        self.number += number
        return True


class _Tokens:
    """The tokens of one sequence."""

    __slots__ = ("is_finished", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.is_finished = False


class HeldCall:
    """The bytes and tokens of one call, as long as there is room for all of them."""

    def __init__(self, held: HeldBytes) -> None:
        """`held` counts the bytes of all calls."""
        self._held = held
        self._num_bytes = 0
        self._sequences: dict[int, _Tokens] = {}
        self.is_complete = True
        """Whether all that another replica needs is held."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes of the request until `release`."""
        if self.is_complete and self._held.take(num_bytes):
            self._num_bytes += num_bytes
        else:
            self.is_complete = False

    def add_tokens(self, sequences: Iterable[tuple[int, Sequence[int], bool]]) -> None:
        """Add tokens, as the fields of a SequenceProgress for each sequence."""
        if not self.is_complete:
            return
        num_tokens = 0
        for number, token_ids, is_finished in sequences:
            tokens = self._sequences.get(number)
            if tokens is None:
                tokens = self._sequences[number] = _Tokens()
            tokens.token_ids.extend(token_ids)
            tokens.is_finished = tokens.is_finished or is_finished
            num_tokens += len(token_ids)
        self.hold(4 * num_tokens)

    def sequence(self, number: int) -> SequenceProgress:
        """Return the tokens of one sequence."""
        tokens = self._sequences.get(number)
        if tokens is None:
            return SequenceProgress(number, (), False)
        return SequenceProgress(number, tuple(tokens.token_ids), tokens.is_finished)

    def forgo(self) -> None:
        """Hold no more than so far, since the call will not continue."""
        self.is_complete = False

    def release(self) -> None:
        """Release everything."""
        self._held.number -= self._num_bytes
        self._num_bytes = 0
        self.is_complete = False
        self._sequences.clear()


def receive_carried(scope: Scope, receive: Receive) -> Receive:
    """Return a `receive` that begins with the body that `scope` carries, if any.

    The messages of the body may be received again, which applications ignore.
    """
    body: bytes | None = scope.pop(BODY_KEY, None)
    if body is None:
        return receive
    is_taken = False

    async def receive_body_first() -> Message:
        nonlocal is_taken
        if is_taken:
            return await receive()
        is_taken = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_body_first


class ProxiedMessage(NamedTuple):
    """The message of a call, with the data that keeps the call the same in any replica.

    Clients cannot send such a message: Serve decodes their messages as bytes.
    """

    body: bytes
    continuation: Continuation

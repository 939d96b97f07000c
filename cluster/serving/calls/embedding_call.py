"""A running embedding call, with vectors that can be awaited and cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pagedray.errors import DeadlineError, EngineError, PagedRayError

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["EmbeddingCall", "EmbeddingOutput"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingOutput:
    """The vectors of one call."""

    vectors: NDArray[np.float32]
    """`[num_prompts, size]`, in the order of the prompts."""
    num_prompt_tokens: int


class EmbeddingCall:
    """A running call that embeds or scores texts."""

    def __init__(self, running: Future[NDArray[np.float32]]) -> None:
        loop = asyncio.get_running_loop()
        self._running = running
        self._answer: asyncio.Future[NDArray[np.float32]] = loop.create_future()

        def deliver(done: Future[NDArray[np.float32]]) -> None:
            # The loop may be closed, with no reader left.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._take, done)

        running.add_done_callback(deliver)

    async def vectors(self, deadline_s: float | None) -> NDArray[np.float32]:
        """Return the vectors; cancelling the wait cancels the call.

        Raises EngineError, and DeadlineError at the deadline.
        """
        timeout_s = None if deadline_s is None else deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer
        except TimeoutError as error:
            raise DeadlineError("The deadline passed before the texts were embedded.") from error
        finally:
            self._running.cancel()

    def abort(self) -> None:
        """Fail the call, which has no partial result."""
        self.fail(EngineError("The call was aborted."))

    def fail(self, error: PagedRayError) -> None:
        """End the call with an error, unless it has ended."""
        self._running.cancel()
        if not self._answer.done():
            self._answer.set_exception(error)

    def _take(self, done: Future[NDArray[np.float32]]) -> None:
        if self._answer.done() or done.cancelled():
            return
        error = done.exception()
        if error is None:
            self._answer.set_result(done.result())
        else:
            self._answer.set_exception(error)

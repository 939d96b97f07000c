"""The messages of a call, kept so that a client can resume after a lost connection.

Messages are numbered from 1. A stream has one reader at a time, the call that resumed it last.
Without a reader, generation continues within the limits of the stream's buffer, until the grace
time is over.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Self

from cluster.serving.resume.kept_messages import KeptMessages, memory_of
from pagedray.errors import InternalError, PagedRayError, StreamTakenError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from cluster.serving.calls.generation_call import GenerationCall
    from cluster.serving.memory.output_buffer import OutputBuffer

__all__ = ["ResumableStream", "StreamReader"]

logger = logging.getLogger(__name__)

_MOST_TAKEN_BYTES = 2**16
"""A reader takes messages at once until they have this many bytes."""


class ResumableStream:
    """One stream; its owner closes it after the grace period. Used from the event loop only."""

    def __init__(
        self,
        generation: GenerationCall,
        *,
        buffer: OutputBuffer,
        make_room: Callable[[int], None],
        note_detached: Callable[[], None],
    ) -> None:
        """Messages are counted in `buffer`; `make_room` frees bytes for the next message.

        `note_detached` is called when the reader leaves.
        """
        self.id = generation.id
        self.is_finished = False
        """Whether no message will follow."""
        self._generation = generation
        self._buffer = buffer
        self._make_room = make_room
        self._note_detached = note_detached
        self._messages = KeptMessages()
        self._num_sent = 0
        """The last number that any reader has taken."""
        self._num_delivered = 0
        """The last number that the current or last reader has taken."""
        self._error: PagedRayError | None = None
        self._reader: StreamReader | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def has_reader(self) -> bool:
        """Whether a client reads the stream."""
        return self._reader is not None

    @property
    def is_delivered(self) -> bool:
        """Whether it is finished and a reader has taken all messages."""
        return self.is_finished and self._num_delivered == self._messages.last

    @property
    def num_delivered_bytes(self) -> int:
        """Bytes of messages that its reader has taken; they can be dropped."""
        return self._messages.num_bytes_to(self._num_delivered)

    def start(self, batches: AsyncGenerator[Sequence[bytes]]) -> None:
        """Keep the messages that are generated, which are numbered from 1."""
        self._task = asyncio.get_running_loop().create_task(self._keep_all(batches))

    def can_resume(self, number: int) -> bool:
        """Return whether the message `number` was sent and all that follow it are kept."""
        return self._messages.first - 1 <= number <= self._num_sent

    def ends_at(self, number: int) -> bool:
        """Return whether nothing follows the message `number`."""
        return self.is_finished and self._error is None and number == self._messages.last

    def attach_reader(self, number: int) -> StreamReader:
        """Return a reader of the messages after `number`, instead of the current reader."""
        assert self._messages.first - 1 <= number <= self._messages.last
        taken, self._reader = self._reader, StreamReader(self, number)
        if taken is not None:
            taken.wake()
        self._num_delivered = number
        return self._reader

    def detach_reader(self, reader: StreamReader) -> None:
        """Continue without the reader, unless another reader has replaced it."""
        if self._reader is reader:
            self._reader = None
            self._note_detached()

    def take_messages(self, reader: StreamReader, number: int) -> list[bytes]:
        """Return messages after `number`. Raises StreamTakenError, or the error of the call."""
        if self._reader is not reader:
            raise StreamTakenError
        taken = self._messages.take(number, _MOST_TAKEN_BYTES)
        self._num_delivered = number + len(taken)
        self._num_sent = max(self._num_sent, self._num_delivered)
        if not taken and self._error is not None:
            raise self._error
        return taken

    def drop_delivered(self, num_bytes: int) -> None:
        """Drop the oldest delivered messages, of at least `num_bytes` if there are that many."""
        num_dropped = 0
        while num_dropped < num_bytes and self._messages.first <= self._num_delivered:
            num_dropped += self._messages.drop_first()
        self._buffer.remove(num_dropped)

    def abort(self) -> None:
        """End generation; the messages end with the text generated so far."""
        if not self.is_finished:
            self._generation.abort()

    def close(self) -> None:
        """Abort generation and drop all messages; idempotent."""
        if self._task is not None:
            self._task.cancel()
        self._generation.close()
        self._messages.clear()
        self._buffer.clear()
        self.is_finished = True
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.wake()

    async def _keep_all(self, batches: AsyncGenerator[Sequence[bytes]]) -> None:
        try:
            async with aclosing(batches):
                async for batch in batches:
                    for message in batch:
                        self._keep(message)
                    if self._reader is not None:
                        self._reader.wake()
        except PagedRayError as error:
            self._error = error
            self._generation.close(error)
        except Exception as error:
            logger.error("A resumable stream failed.", exc_info=error)
            self._error = InternalError()
        finally:
            self.is_finished = True
            self._generation.close()
            if self._reader is not None:
                self._reader.wake()

    def _keep(self, message: bytes) -> None:
        """Append a message. Raises UnreadError if there is no room."""
        num_bytes = memory_of(message)
        self._make_room(num_bytes)
        self._buffer.add(num_bytes)
        self._messages.append(message)


class StreamReader:
    """Reads messages of a stream, several at once, until they end or another call resumes it."""

    def __init__(self, stream: ResumableStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[bytes]:
        while True:
            messages = self._stream.take_messages(self, self._number)
            if messages:
                self._number += len(messages)
                return messages
            if self._stream.is_finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def wake(self) -> None:
        """Let the waiting reader check for messages."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        """Leave the stream, which can be resumed; idempotent."""
        self._stream.detach_reader(self)

"""The base class of responses that are streamed as named events: one turn, whole or in pieces."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import aclosing
from typing import TYPE_CHECKING

from cluster.serving.tools.turn_reader import TurnDelta
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.servicer import GenerationCall, GenerationOutput, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.tools.turns import Turns

__all__ = ["EventResponse"]

_OUTPUT_BYTES = 128
"""Memory of an output without its content."""


class EventResponse(ABC):
    """The response to a call of one sequence."""

    def __init__(self, generation: GenerationCall, turns: Turns) -> None:
        self._generation = generation
        self._turns = turns
        self._turn = turns.begin_turn() if turns.are_read else None
        self._num_events = 0
        """Events that were written, in an API that numbers them."""

    async def complete(self, buffer: OutputBuffer) -> Sequence[bytes]:
        """Return the response once it is complete. Raises PagedRayError.

        Its parts are counted in `buffer` while they are collected.
        """
        usage = last = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for output in outputs:
                usage = output.usage
                (last,) = output.sequences
                error = last.failure
                try:
                    if error is not None:
                        raise error
                    buffer.collect(_OUTPUT_BYTES + len(last.text))
                except PagedRayError as rejection:
                    self._generation.close(rejection)
                    raise
                self._collect(self._delta(last))
        assert usage is not None
        assert last is not None
        await asyncio.sleep(0)
        parts = self._encode_response(last, usage)
        # It may repeat more of the request than was generated.
        buffer.collect(sum(map(len, parts)))
        return parts

    async def events(self) -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        """Yield server-sent events, large ones in parts; an error becomes the last one."""
        if self._generation.replayed is not None:
            # The client has received these events, perhaps in smaller pieces.
            self._encode_events(self._generation.replayed)
            assert self._generation.continuation is not None
            self._num_events = self._generation.continuation.num_events
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    written = self._encode_events(output)
                    if written:
                        yield written
                    for sequence in output.sequences:
                        if (error := sequence.failure) is not None:
                            raise error
        except Exception as error:
            yield self._error_event(self._generation.end_with(error))

    def _delta(self, sequence: SequenceOutput) -> TurnDelta:
        if self._turn is None:
            return TurnDelta(content=sequence.text)
        return self._turn.read(sequence)

    @abstractmethod
    def _collect(self, delta: TurnDelta) -> None:
        """Add what the turn gained to the complete response."""

    @abstractmethod
    def _encode_response(self, last: SequenceOutput, usage: Usage) -> Sequence[bytes]:
        """Return the parts of the complete response; `last` is the last output."""

    @abstractmethod
    def _encode_events(self, output: GenerationOutput) -> bytes | tuple[bytes, ...]:
        """Return the events of the next output, none of them for an error; large ones in parts."""

    @abstractmethod
    def _error_event(self, error: PagedRayError) -> bytes:
        """Return the event of an error."""

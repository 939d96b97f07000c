"""The responses of completions and chat completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.openai.complete_response import CompleteResponse
from cluster.serving.openai.response_chunks import ResponseChunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.openai.choice_format import ChoiceFormat

__all__ = ["GenerationResponse"]


class GenerationResponse:
    """The response to one call, complete or as a stream of events, in the format of an endpoint."""

    def __init__(self, format: ChoiceFormat) -> None:
        self._format = format

    async def complete(self, buffer: OutputBuffer) -> list[bytes]:
        """Return the parts of the response once it is complete. Raises PagedRayError.

        They are counted in `buffer` while they are collected.
        """
        return await CompleteResponse(self._format).parts(buffer)

    def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events; an error becomes the last event before `[DONE]`."""
        return ResponseChunks(self._format).events()

    def numbered_events(self) -> AsyncGenerator[list[bytes]]:
        """Yield the same events, those of an output together, each with its number as its id."""
        return ResponseChunks(self._format).numbered_events()

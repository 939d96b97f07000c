"""Writes the output of a call as chunks, in server-sent events.

Chunks differ mostly in their text; their common parts are encoded once.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.openai.last_events import DONE_EVENT, error_event, numbered_event
from cluster.serving.openai.response_choice import StreamedChoice
from cluster.serving.text.text_stream import SequenceOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from cluster.serving.http.errors import Json
    from cluster.serving.openai.choice_format import ChoiceFormat
    from cluster.serving.servicer import GenerationOutput
    from pagedray.errors import PagedRayError

__all__ = ["ResponseChunks"]

_BARE = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'

_encode = msgspec.json.Encoder().encode


class ResponseChunks:
    """The chunks of the response to one call."""

    def __init__(self, format: ChoiceFormat) -> None:
        self._format = format
        self._generation = format.generation
        self._options = format.options
        self._choices: dict[int, StreamedChoice] = {}
        self._error: PagedRayError | None = None
        """What went wrong in a choice; it ends the stream."""
        chunk_head = _encode(format.head(format.chunk_kind))[:-1]
        self._begin = b"data: " + chunk_head + b',"choices":[{"index":'
        self._end_chunks(b',"usage":null' if self._options.includes_usage else b"")

    def _end_chunks(self, rest: bytes) -> None:
        """Let chunks end with these fields, after their choices."""
        self._end = rest + b"}\n\n"
        self._bare_end = self._format.bare_end + _BARE + self._end

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events; an error becomes the last event before `[DONE]`."""
        write = self._events_with_usage if self._options.has_continuous_usage else self._events
        if self._generation.replayed is not None:
            # The client has received these events; they bring the choices to where it was cut off.
            for _ in write(self._generation.replayed):
                pass
            self._note_begun_choices()
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    written = b"".join(write(output))
                    if written:
                        yield written
                    if self._error is not None:
                        raise self._error
        except Exception as error:
            yield error_event(self._generation.end_with(error))
        yield DONE_EVENT

    async def numbered_events(self) -> AsyncGenerator[list[bytes]]:
        """Yield the same events, those of an output together, each with its number as its id."""
        write = self._events_with_usage if self._options.has_continuous_usage else self._events
        number = 0
        try:
            async with aclosing(self._generation.outputs()) as outputs:
                async for output in outputs:
                    written = [event for event in write(output) if event]
                    first, number = number + 1, number + len(written)
                    yield [
                        numbered_event(event, first + place) for place, event in enumerate(written)
                    ]
                    if self._error is not None:
                        raise self._error
        except Exception as error:
            number += 1
            yield [numbered_event(error_event(self._generation.end_with(error)), number)]
        yield [numbered_event(DONE_EVENT, number + 1)]

    def _events_with_usage(self, output: GenerationOutput) -> Iterator[bytes]:
        self._end_chunks(b',"usage":' + _encode(self._format.usage(output.usage)))
        return self._events(output)

    def _events(self, output: GenerationOutput) -> Iterator[bytes]:
        for sequence in output.sequences:
            choice = self._choice(sequence)
            if choice.is_new:
                yield from self._choices_before(choice.index)
            if not (
                choice.is_new
                or not choice.is_plain
                or sequence.finish_reason is not None
                or sequence.logprobs
            ):
                if sequence.text:
                    yield choice.bare_begin + _encode(sequence.text) + self._bare_end
                continue
            error = sequence.failure
            self._error = self._error or error
            if error is None or sequence.text or not choice.is_new:
                yield self._full_event(sequence, choice)
        if output.is_last and self._error is None and self._options.includes_usage:
            head = _encode(self._format.head(self._format.chunk_kind))[:-1]
            yield b'data: %b,"choices":[],"usage":%b}\n\n' % (
                head,
                _encode(self._format.usage(output.usage)),
            )

    def _choices_before(self, index: int) -> Iterator[bytes]:
        """Begin the choices with lower indices: clients read the first events of all in order.

        Their sequences may begin later.
        """
        for lower in range(index):
            if lower not in self._choices:
                prompt_index, place = divmod(lower, self._options.num_per_prompt)
                nothing = SequenceOutput(
                    prompt_index=prompt_index, index=place, text="", token_ids=()
                )
                yield self._full_event(nothing, self._choice(nothing))

    def _note_begun_choices(self) -> None:
        """Note which choices the client of a call that continues has events of."""
        continuation = self._generation.continuation
        assert continuation is not None
        begun = [one.number for one in continuation.sequences if one.token_ids or one.is_finished]
        for _ in self._choices_before(max(begun, default=-1) + 1):
            pass

    def _full_event(self, sequence: SequenceOutput, choice: StreamedChoice) -> bytes:
        delta = self._format.delta(sequence, choice)
        reason = self._format.reason(sequence, choice)
        has_token_ids = self._options.has_token_ids
        has_more = sequence.logprobs or (has_token_ids and sequence.token_ids)
        if not (delta or choice.is_new or reason or has_more):
            return b""
        if choice.is_new and self._options.echoed_texts:
            prompt = self._options.echoed_texts[sequence.prompt_index]
            delta = {**delta, "text": prompt + sequence.text}
        fields = {
            **self._format.wrapped(delta),
            "logprobs": self._format.logprobs(sequence, choice),
            "finish_reason": reason,
            "stop_reason": sequence.stop_reason,
        }
        prompt_ids: Json = {}
        if has_token_ids:
            fields["token_ids"] = sequence.token_ids
            if choice.is_new:
                prompt_ids = self._format.prompt_ids(sequence.prompt_index)
        if prompt_ids and not self._format.has_prompt_in_choice:
            end = b"]," + _encode(prompt_ids)[1:-1] + self._end
        else:
            fields |= prompt_ids
            end = b"]" + self._end
        choice.is_new = False
        if choice.turn is not None:
            choice.is_plain = choice.turn.is_plain and not has_token_ids
        # The first brace is dropped: the choice begins with its index.
        return self._begin + b"%d," % choice.index + _encode(fields)[1:] + end

    def _choice(self, sequence: SequenceOutput) -> StreamedChoice:
        index = self._options.index_of(sequence)
        choice = self._choices.get(index)
        if choice is None:
            turn = self._format.begin_turn()
            choice = self._choices[index] = StreamedChoice(
                index=index,
                turn=turn,
                bare_begin=self._begin + b"%d" % index + self._format.bare_begin,
                is_plain=turn is None and not self._options.has_token_ids,
            )
        return choice

"""The responses of completions and chat completions."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.openai.response_choice import (
    DONE_EVENT,
    CompleteChoice,
    PromptReportForm,
    PromptReports,
    StreamedChoice,
    aborted_prompts,
    error_event,
    numbered_event,
    take_returned,
)
from cluster.serving.text.text_stream import SequenceOutput
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator, Mapping

    from cluster.serving.http.endpoint import Json
    from cluster.serving.intake import OutputBuffer
    from cluster.serving.openai.chat_format import ChoiceFormat
    from cluster.serving.servicer import GenerationOutput

__all__ = ["GenerationResponse", "ResponseChunks"]

_OUTPUT_BYTES = 128
"""Memory of an output without its content."""
_TOKEN_BYTES = 40
"""Memory of a token id in a list."""
_encode = msgspec.json.Encoder().encode

_BARE = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]'


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
        """Yield the same events, grouped by output, each with its number as its id."""
        return ResponseChunks(self._format).numbered_events()


class CompleteResponse:
    """The response to one call, written once all of its output is known."""

    def __init__(self, format: ChoiceFormat) -> None:
        self._format = format
        self._generation = format.generation
        self._options = format.options
        self._choices: dict[int, CompleteChoice] = {}

    async def parts(self, buffer: OutputBuffer) -> list[bytes]:
        """Return the parts of the response. Raises PagedRayError.

        They are counted in `buffer` while they are collected.
        """
        usage = None
        async with aclosing(self._generation.outputs()) as outputs:
            async for output in outputs:
                usage = output.usage
                num_bytes = 0
                for sequence in output.sequences:
                    error = sequence.failure
                    if error is not None:
                        self._generation.close(error)
                        raise error
                    num_bytes += self._collect(sequence)
                try:
                    buffer.collect(num_bytes)
                except PagedRayError as error:
                    self._generation.close(error)
                    raise
        assert usage is not None
        if self._options.hides_output:
            usage = msgspec.structs.replace(usage, num_generated_tokens=0)
        prompts = await self._prompt_reports(buffer)
        head = self._format.head(self._format.kind)
        if not self._format.has_prompt_in_choice:
            head |= self._format.prompt_ids(0) if self._options.has_token_ids else {}
            head |= prompts.fields(0)
        parts = [_encode(head)[:-1] + b',"choices":[']
        for index, choice in enumerate(take_returned(self._choices, self._options)):
            # Encoding all at once would hold the event loop.
            await asyncio.sleep(0)
            choice.index = index
            parts += [self._encode_choice(choice, prompts), b","]
        parts[-1] = b'],"usage":%b}' % _encode(self._format.usage(usage))
        return parts

    def _collect(self, sequence: SequenceOutput) -> int:
        """Add an output to its choice; return the bytes that this takes."""
        choice = self._choice(sequence)
        choice.last = sequence
        if self._options.hides_output:
            return _OUTPUT_BYTES
        self._format.add_content(sequence, choice)
        num_bytes = _OUTPUT_BYTES + len(sequence.text)
        if self._options.num_returned < self._options.num_per_prompt:
            choice.sum_logprobs += sum(one.chosen for one in sequence.logprobs)
            choice.num_tokens += len(sequence.logprobs)
        if self._options.has_token_ids:
            choice.token_ids += sequence.token_ids
            num_bytes += _TOKEN_BYTES * len(sequence.token_ids)
        # As JSON, entries take less memory than as objects, and no time at the end.
        for name, value in (self._format.logprobs(sequence, choice) or {}).items():
            if isinstance(value, list):
                parts = choice.logprobs.setdefault(name, [])
                if value:
                    parts.append(_encode(value)[1:-1])
                    num_bytes += len(parts[-1])
        return num_bytes

    def _choice(self, sequence: SequenceOutput) -> CompleteChoice:
        index = self._options.index_of(sequence)
        choice = self._choices.get(index)
        if choice is None:
            choice = CompleteChoice(index=index, turn=self._format.begin_turn())
            self._choices[index] = choice
        return choice

    def _encode_choice(self, choice: CompleteChoice, prompts: PromptReports) -> bytes:
        last = choice.last
        assert last is not None
        if self._options.echoed_texts:
            choice.texts.insert(0, self._options.echoed_texts[last.prompt_index])
        fields = {
            "index": choice.index,
            **self._format.content(choice),
            "logprobs": self._logprobs(choice, prompts.lists(last.prompt_index)),
            "finish_reason": self._format.reason(last, choice),
            "stop_reason": last.stop_reason,
        }
        if self._format.has_prompt_in_choice:
            fields |= prompts.fields(last.prompt_index)
        if self._options.has_token_ids:
            fields["token_ids"] = choice.token_ids
            if self._format.has_prompt_in_choice:
                fields |= self._format.prompt_ids(last.prompt_index)
        return _encode(fields)

    def _logprobs(
        self, choice: CompleteChoice, of_prompt: Mapping[str, list[bytes]]
    ) -> Json | None:
        """Return the log-probabilities of a choice, after the log-probabilities of its prompt."""
        if not self._options.has_logprobs:
            return None
        lists = {
            name: msgspec.Raw(
                b"[%b]" % b",".join([*of_prompt.get(name, ()), *choice.logprobs.get(name, ())])
            )
            for name in {**of_prompt, **choice.logprobs}
        }
        return {**self._format.token_logprobs([], choice), **lists}

    async def _prompt_reports(self, buffer: OutputBuffer) -> PromptReports:
        form = PromptReportForm(
            num_listed=self._options.num_prompt_logprobs,
            num_echoed=self._options.num_echoed_logprobs,
            echoed_texts=self._options.echoed_texts,
            token_bytes=self._format.token_bytes,
            token_text=self._format.token_text,
        )
        return await PromptReports.of_prompts(
            form,
            self._generation.prompts,
            self._generation.prompt_logprobs,
            aborted=aborted_prompts(self._choices, self._options),
            buffer=buffer,
        )


class ResponseChunks:
    """The chunks of the response to one call."""

    def __init__(self, format: ChoiceFormat) -> None:
        self._format = format
        self._generation = format.generation
        self._options = format.options
        self._choices: dict[int, StreamedChoice] = {}
        self._error: PagedRayError | None = None
        """The error of a choice; it ends the stream."""
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
            # The client has received these events; they bring the choices to the point of the cut.
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
        """Yield the same events, grouped by output, each with its number as its id."""
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
        """Begin the choices with lower indices, since clients expect the first events in order.

        The sequences of these choices may begin later.
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

"""Collects the output of a call into one response.

Every output is encoded as it arrives, so that little remains to be done at the end.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.openai.prompt_reports import PromptReportForm, PromptReports
from cluster.serving.openai.response_choice import CompleteChoice, aborted_prompts, take_returned
from pagedray.errors import PagedRayError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.serving.http.errors import Json
    from cluster.serving.memory.output_buffer import OutputBuffer
    from cluster.serving.openai.choice_format import ChoiceFormat
    from cluster.serving.text.text_stream import SequenceOutput

__all__ = ["CompleteResponse"]

_OUTPUT_BYTES = 128
"""Memory of an output without its content."""
_TOKEN_BYTES = 40
"""Memory of a token id in a list."""

_encode = msgspec.json.Encoder().encode


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
        """Return the log-probabilities of a choice, after those of its prompt."""
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

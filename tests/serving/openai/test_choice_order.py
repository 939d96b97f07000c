"""Choices whose sequences begin in another order, as with late masks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from cluster.serving.openai.chat_format import ChatFormat
from cluster.serving.openai.generation_response import GenerationResponse
from cluster.serving.openai.response_choice import ResponseOptions
from cluster.serving.servicer import GenerationOutput, Usage
from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

USAGE = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=1)


def output(index: int, text: str, *, is_end: bool = False) -> GenerationOutput:
    reason = FinishReason.STOP if is_end else None
    sequence = SequenceOutput(index=index, text=text, token_ids=(5,), finish_reason=reason)
    return GenerationOutput(sequences=(sequence,), usage=USAGE, is_last=is_end and index == 1)


async def test_a_client_library_reads_choices_that_begin_late() -> None:
    async def outputs() -> AsyncGenerator[GenerationOutput]:
        yield output(2, "c")
        yield output(0, "a")
        yield output(2, "C", is_end=True)
        yield output(0, "A", is_end=True)
        yield output(1, "b", is_end=True)

    call: Any = SimpleNamespace(id="r", replayed=None, outputs=outputs)  # Any: a part of it
    nothing: Any = None  # Any: what these choices do not need
    format = ChatFormat(
        call,
        nothing,
        ResponseOptions(
            model="tiny",
            created_s=0,
            num_per_prompt=3,
            num_returned=3,
            has_logprobs=False,
            includes_usage=False,
        ),
        Turns(ToolUse((), ToolChoice(kind="none"), tool_format=None)),
        has_functions=False,
    )
    response = GenerationResponse(format)
    events = b"".join([event async for event in response.events()]).decode().split("\n\n")
    chunks = [json.loads(one.removeprefix("data: ")) for one in events if one.startswith("data: {")]
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    choices = state.get_final_completion().choices
    assert [choice.message.content for choice in choices] == ["aA", "b", "cC"]
    roles = [
        choice["index"] for one in chunks for choice in one["choices"] if "role" in choice["delta"]
    ]
    assert roles == [0, 1, 2]

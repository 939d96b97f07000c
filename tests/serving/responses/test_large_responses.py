"""Streams whose response repeats much of the request: only what repeats it is large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from cluster.serving.responses.response import ResponsesResponse
from cluster.serving.responses.responses_body import Echo
from cluster.serving.servicer import GenerationOutput, Usage
from cluster.serving.text.text_stream import SequenceOutput
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


def output(text: str, finish_reason: FinishReason | None = None) -> GenerationOutput:
    sequence = SequenceOutput(index=0, text=text, token_ids=(5,), finish_reason=finish_reason)
    usage = Usage(num_prompt_tokens=1, num_cached_tokens=0, num_generated_tokens=1)
    return GenerationOutput(sequences=(sequence,), usage=usage, is_last=finish_reason is not None)


@pytest.mark.parametrize(("num_bytes", "is_large"), [(2**15, True), (100, False)])
async def test_only_events_that_repeat_the_request_are_in_parts(
    num_bytes: int, is_large: bool
) -> None:
    async def outputs() -> AsyncGenerator[GenerationOutput]:
        for text in "abc":
            yield output(text)
        yield output("d", FinishReason.STOP)

    call: Any = SimpleNamespace(
        id="r", replayed=None, continuation=None, outputs=outputs
    )  # Any: a part of it
    large = b'"instructions":"%b"' % (b"x" * num_bytes)
    response = ResponsesResponse(
        call,
        Turns(ToolUse((), ToolChoice(kind="none"), tool_format=None)),
        model="tiny",
        created_s=0,
        echo=Echo({}, large),
        response_id="resp_r",
        names={},
    )
    events = [event async for event in response.events()]
    assert [isinstance(event, tuple) for event in events] == [is_large, False, False, is_large]
    joined = [b"".join(event) if isinstance(event, tuple) else event for event in events]
    # Two events at the start, one at the end.
    assert [event.count(large) for event in joined] == [2, 0, 0, 1]

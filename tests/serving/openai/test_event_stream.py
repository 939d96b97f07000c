"""Streams of events: their order, their text offsets, and how connections get them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import tokenizers
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk
from tokenizers import decoders, models

from cluster.serving.continuation import PROGRESS_KEY
from cluster.serving.openai.chat_format import ChatFormat
from cluster.serving.openai.event_stream import EventStream
from cluster.serving.openai.generation_response import GenerationResponse
from cluster.serving.openai.response_choice import ResponseOptions, TextOffsets
from cluster.serving.servicer import GenerationOutput, Usage
from cluster.serving.text.text_stream import SequenceOutput, TokenBytes
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from cluster.serving.tools.turns import Turns
from pagedray.request import FinishReason
from tests.virtual_time import in_virtual_time

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.types import Message

    from cluster.serving.continuation import Encoded
    from tests.serving.conftest import Server


async def test_large_events_are_sent_in_pieces_that_their_client_has_read() -> None:
    parts = (b"data: ", b"x" * 300_000, b"y" * 200_000, b"\n\n")
    sent: list[bytes] = []
    num_unread = most_unread = 0

    async def events() -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        yield parts
        yield b"data: [DONE]\n\n"

    async def send(message: Message) -> None:
        nonlocal num_unread, most_unread
        body = message.get("body", b"")
        num_unread += len(body)
        most_unread = max(most_unread, num_unread)
        # The client reads all of it.
        await asyncio.sleep(0)
        num_unread -= len(body)
        sent.append(body)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    await EventStream("r", events(), close=lambda: None)({}, receive, send)
    assert b"".join(sent) == b"".join(parts) + b"data: [DONE]\n\n"
    assert most_unread <= 2**17


async def _passes_of(events: list[bytes | tuple[bytes, ...]]) -> list[int]:
    """Return the pass of the event loop in which each body is sent, the first being 0."""
    num_passes = 0
    passes: list[int] = []

    async def count() -> None:
        nonlocal num_passes
        while True:
            await asyncio.sleep(0)
            num_passes += 1

    async def given() -> AsyncGenerator[bytes | tuple[bytes, ...]]:
        for event in events:
            yield event

    async def send(message: Message) -> None:
        if message.get("body"):
            passes.append(num_passes)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    counting = asyncio.create_task(count())
    await EventStream("r", given(), close=lambda: None)({}, receive, send)
    counting.cancel()
    return [one - passes[0] for one in passes]


async def test_other_tasks_run_between_the_pieces_of_a_large_event() -> None:
    passes = await _passes_of([(b"x" * 200_000,), b"y"])
    assert len(passes) == 5
    assert passes[:4] == sorted(set(passes[:4]))
    # Nothing waits behind the last piece.
    assert passes[4] == passes[3]


async def test_nothing_waits_behind_small_events() -> None:
    assert await _passes_of([b"a", (b"b", b"c"), b"d", (b"e" * 2**16,), b"f"]) == [0] * 5


@in_virtual_time
async def test_a_client_hears_while_events_take_long() -> None:
    sent = await _sent(first_s=40.0, second_s=33.0)
    assert [body for body, _ in sent] == [*[b"ping"] * 2, b"a", *[b"ping"] * 2, b"b", b""]
    assert [progress and progress[0] for _, progress in sent] == [1, 2, 3, 4, 5, 6, None]


@in_virtual_time
async def test_events_in_time_come_alone() -> None:
    sent = await _sent(first_s=14.0, second_s=14.0)
    assert [body for body, _ in sent] == [b"a", b"b", b""]


async def _sent(*, first_s: float, second_s: float) -> list[tuple[bytes, Encoded | None]]:
    """Return the bodies and the progress that a stream sends, whose events take so long."""
    sent: list[tuple[bytes, Encoded | None]] = []
    num_taken = 0

    async def events() -> AsyncGenerator[bytes]:
        await asyncio.sleep(first_s)
        yield b"a"
        await asyncio.sleep(second_s)
        yield b"b"

    async def send(message: Message) -> None:
        # A client that reads slowly gets one after the other.
        await asyncio.sleep(1.0)
        if "body" in message:
            sent.append((message["body"], message.get(PROGRESS_KEY)))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    def take_progress() -> Encoded:
        nonlocal num_taken
        num_taken += 1
        return num_taken, (), 0, False, False

    stream = EventStream(
        "r", events(), close=lambda: None, take_progress=take_progress, waiting_event=b"ping"
    )
    await stream({}, receive, send)
    return sent


@in_virtual_time
async def test_a_client_that_leaves_hears_nothing_more() -> None:
    sent: list[Message] = []

    async def events() -> AsyncGenerator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await asyncio.sleep(50.0)
        return {"type": "http.disconnect"}

    await EventStream("r", events(), close=lambda: None, waiting_event=b"ping")({}, receive, send)
    await asyncio.sleep(100.0)
    assert len(sent) == 4


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


SPECIAL = "<|user|>"
TEXT = "an \u00e9\U0001f389 and"


def completion(server: Server, token_ids: list[int], **given: Any) -> dict[str, Any]:  # Any: JSON
    """Return the choice of a completion that generates these tokens, whatever they are."""
    server.engine.reset()
    server.engine.script = lambda request, index: token_ids
    body = {
        "model": "tiny",
        "prompt": "hello",
        "max_tokens": len(token_ids),
        "ignore_eos": True,
        "logprobs": 0,
        **given,
    }
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    server.engine.reset()
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def check_offsets(choice: dict[str, Any], token_ids: list[int], server: Server) -> int:
    """Check the offset of each token, and return how many show in the text."""
    offsets, text = choice["logprobs"]["text_offset"], choice["text"]
    token_bytes = server.tokenizer.token_bytes
    num_shown, at = 0, 0
    for token_id, offset in zip(token_ids, offsets, strict=True):
        data = token_bytes.bytes_of(token_id)
        # Characters of which not all bytes have come do not count.
        assert offset == len(text.encode()[:at].decode(errors="ignore"))
        if text.encode()[at:].startswith(data):
            at += len(data)
            num_shown += 1
        else:
            assert token_bytes.is_special(token_id)
    assert at == len(text.encode())
    return num_shown


def tokens_of(server: Server, text: str) -> list[int]:
    return server.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("by_id", [True, False])
def test_generated_tokens(server: Server, skips: bool, by_id: bool) -> None:
    token_ids = [*tokens_of(server, TEXT), 0, *tokens_of(server, TEXT)]
    choice = completion(
        server,
        token_ids,
        skip_special_tokens=skips,
        return_tokens_as_token_ids=by_id,
    )
    assert check_offsets(choice, token_ids, server) == len(token_ids) - skips


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("is_text", [True, False])
def test_echoed_tokens(server: Server, is_text: bool, skips: bool) -> None:
    text = f"{TEXT}{SPECIAL}{TEXT}"
    prompt = text if is_text else server.tokenizer.encode(text)
    token_ids = tokens_of(server, TEXT)
    choice = completion(
        server,
        token_ids,
        prompt=prompt,
        echo=True,
        return_token_ids=True,
        skip_special_tokens=skips,
    )
    prompt_ids = choice["prompt_token_ids"]
    assert sum(map(server.tokenizer.token_bytes.is_special, prompt_ids)) == 2
    num_shown = check_offsets(choice, prompt_ids + token_ids, server)
    # A text has the token that it was written with, but not the one that begins the prompt.
    num_hidden = 1 if is_text else 2 if skips else 0
    assert num_shown == len(prompt_ids) + len(token_ids) - num_hidden


def test_bytes_of_one_character_begin_where_it_does() -> None:
    tokens = ["\u2581an", "<0xC3>", "<0xA9>", "."]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    assert tokenizer.decode([0, 1, 2, 3, 1, 3]) == "an\u00e9.\ufffd."
    offsets = TextOffsets.of_prompt(TokenBytes(tokenizer))
    assert offsets.of_tokens([0, 1, 2, 3, 1, 3]) == [0, 2, 2, 3, 4, 5]

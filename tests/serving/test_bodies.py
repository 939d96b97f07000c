"""Bodies of JSON, the arguments of calls, and the memory of requests and responses."""

from __future__ import annotations

import asyncio
import json
import platform
import time
from random import Random
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.serving.intake import BufferLimits, MemoryTrimmer, OutputBuffers
from cluster.serving.json_body import json_text, read_arguments, read_body, read_json
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from pagedray.errors import InvalidRequestError, OverloadedError, UnreadError

if TYPE_CHECKING:
    from cluster.serving.openai.bodies.generation_body import GenerationBody

MESSAGE = b'{"role":"user","content":"a"}'
PART = b'{"type":"text","text":"a"}'


def ignore(name: str) -> None:
    pass


def joined(one: bytes, count: int) -> bytes:
    return b",".join([one] * count)


LARGE: dict[str, tuple[type[GenerationBody], bytes, str]] = {
    "messages": (
        ChatBody,
        b'{"model":"tiny","messages":[%s]}' % joined(MESSAGE, 100_000),
        "The body may have at most 32768 strings, not 400003.",
    ),
    "bare messages": (
        ChatBody,
        b'{"model":"tiny","messages":[%s]}' % joined(b"5", 1_000_000),
        "messages may have at most 4096 entries, not 1000000.",
    ),
    "parts": (
        ChatBody,
        b'{"model":"tiny","messages":[{"role":"user","content":[%s]}]}' % joined(PART, 100_000),
        "The body may have at most 32768 strings, not 400006.",
    ),
    "prompts": (
        CompletionBody,
        b'{"model":"tiny","prompt":[%s]}' % joined(b"[5]", 200_000),
        "The body may have at most 8192 arrays and objects, not 200002.",
    ),
    "numbers": (
        CompletionBody,
        b'{"model":"tiny","prompt":[%s]}' % joined(b"5", 2_000_000),
        "The body has a list or an object of 2000000 entries, but the context length of 1048576 "
        "(--max-model-len) allows at most 1048576.",
    ),
    "closing brackets": (
        CompletionBody,
        b'{"model":"tiny","prompt":[%s%s}' % (joined(b"5", 70_000), b"]" * 2_000_000),
        "The body may have at most 8192 arrays and objects, not 2000001.",
    ),
    "escapes": (
        CompletionBody,
        b'{"model":"tiny","prompt":[%s]}' % joined(rb'"\\\"[{"', 100_000),
        "The body may have at most 32768 strings, not 100003.",
    ),
}


@pytest.mark.parametrize("name", LARGE)
def test_body_of_many_objects_is_rejected_before_parsing(name: str) -> None:
    kind, raw, text = LARGE[name]
    started_s = time.thread_time()
    with pytest.raises(InvalidRequestError) as rejected:
        read_body(kind, raw, note_ignored=ignore)
    assert time.thread_time() - started_s < 2.0
    assert str(rejected.value) == text


@pytest.mark.parametrize("seed", range(8))
def test_escapes_are_read_wherever_the_text_is_divided(seed: int) -> None:
    text = "".join(Random(seed).choices('\\\\\\"[{,:', k=400_000))
    assert read_json(json.dumps({"prompt": text, "n": 1}).encode()) == {
        "prompt": text,
        "n": 1,
    }


@pytest.mark.parametrize("text", ['[{,"' * 100_000, '\\"[{,' * 100_000, "\\" * 99_999 + '"[{' * 9])
def test_text_may_contain_any_characters(text: str) -> None:
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_many_messages_are_read_quickly() -> None:
    raw = b'{"model":"tiny","messages":[%s]}' % joined(MESSAGE, 4096)
    started_s = time.thread_time()
    body = read_body(ChatBody, raw, note_ignored=ignore)
    tools = ToolUse((), ToolChoice(kind="none"), tool_format=None)
    given = body.to_input(None, tools, known_variables=frozenset(), note_ignored=ignore)
    assert time.thread_time() - started_s < 3.0
    assert len(given.prompts) == 1


@pytest.mark.parametrize(
    ("raw", "where", "param"),
    [
        (b'{"temperature":1e400}', " for 'temperature'", "temperature"),
        (b'{"a":-1E400}', " for 'a'", "a"),
        (b'{"documents":[{"a":[true,{"b":1.5e999}]}]}', " for 'b'", None),
        (b'{"a":[false,[1e400]]}', "", None),
        (b'{"a":[false,[%s.5]]}' % (b"9" * 309), "", None),
        (b'{"a":%s.5}' % (b"9" * 400), " for 'a'", "a"),
    ],
)
def test_numbers_beyond_a_double_are_rejected(raw: bytes, where: str, param: str | None) -> None:
    text = f"^The body has a number{where} that exceeds the range of a double\\.$"
    with pytest.raises(InvalidRequestError, match=text) as caught:
        read_json(raw)
    assert caught.value.param == param


def test_other_numbers_are_read() -> None:
    raw = b'{"a":[1e308,-1.7E+308,0e400,1e-400,true],"b":"1e400","c":1%s}' % (b"0" * 400)
    assert read_json(raw) == {
        "a": [1e308, -1.7e308, 0.0, 0.0, True],
        "b": "1e400",
        "c": 10**400,
    }


VALUE = {"k\u00f6ln": [1, 2.5, True, None, 2**70], "\U0001f642": {"a": "\n"}}
TEXT = '{"k\u00f6ln":[1,2.5,true,null,1180591620717411303424],"\U0001f642":{"a":"\\n"}}'


def test_text_may_have_the_most_bytes() -> None:
    num_bytes = len(TEXT.encode())
    assert json_text(VALUE, "schema", most_bytes=num_bytes) == TEXT
    with pytest.raises(InvalidRequestError, match=f"at most {num_bytes - 1} bytes") as rejected:
        json_text(VALUE, "schema", most_bytes=num_bytes - 1)
    assert rejected.value.param == "schema"


def test_a_number_that_json_lacks_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="cannot represent"):
        json_text([float("inf")], "schema", most_bytes=100)


HUGE = "9" * 308


def test_arguments_are_read() -> None:
    assert read_arguments("", "arguments") == {}
    text = '{"a": "1e400", "b": [1e308, -1.7E+308, 1e-400, 0e400], "c": %s}' % (HUGE * 2)
    expected = {"a": "1e400", "b": [1e308, -1.7e308, 0.0, 0.0], "c": int(HUGE * 2)}
    assert read_arguments(text, "arguments") == expected


@pytest.mark.parametrize(
    "number", ["1e400", "-1E+400", "1.5e999", f"{HUGE}9.5", f"-{HUGE}.0e1", f"{HUGE}99.5e-1"]
)
@pytest.mark.parametrize("text", ['{"a": %s}', '{"a": [true, {"b": [%s]}], "c": 1.0}'])
def test_arguments_beyond_a_double_are_rejected(text: str, number: str) -> None:
    expected = r"^arguments has a number that exceeds the range of a double\.$"
    with pytest.raises(InvalidRequestError, match=expected):
        read_arguments(text % number, "arguments")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, {}) for text in ("null", " null\n", '""', "{", '{"a', '{"a"', '{"a":')),
        ('{"a": tr', {}),
        ('{"a": 1, "b": [2, {"c": "x', {"a": 1, "b": [2, {"c": "x"}]}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        (r'{"a": "x\ud83d"}', {"a": "x\ufffd"}),
        (r'{"\uDE00": ["\ud83d\ude00", "\ude00\ud83d", "\\ud83d", "\n"]}',
         {"\ufffd": ["\U0001f600", "\ufffd\ufffd", "\\ud83d", "\n"]}),
        (r'{"a": "\ud83d", "b": "x', {"a": "\ufffd", "b": "x"}),
        (f'{{"a": {"[" * 150}1{"]" * 150}}}', None),
    ],
)  # fmt: skip
def test_arguments_that_a_response_may_have_are_read(
    text: str, expected: dict[str, object] | None
) -> None:
    found = read_arguments(text, "arguments")
    assert found == (json.loads(text) if expected is None else expected)


@pytest.mark.parametrize(
    "text",
    [
        *("[1]", "nul", "5", '"x"', "{'a': 1}", '{"a": NaN}', '{"a": Infinity}', '{"a": 1} x'),
        *('{"a" 1', '{"a": 1]', "[", '"{', r'{"a": "\ud83d", b}', r"\ud83d"),
    ],
)
def test_other_texts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^arguments must be a JSON object as a string"):
        read_arguments(text, "arguments")


MIB = 2**20
DELAY_S = 0.05
NUM_TRIES = 5
"""A server of other tests in this process may trim memory too, a second after they have ended."""


def rss() -> int:
    return int(psutil.Process().memory_info().rss)


def leave_gaps(num_mib: int) -> list[bytes]:
    """Make the allocator keep about so much memory; what is returned lies between the gaps."""
    blocks = [bytes(100_000) for _ in range(10 * num_mib)]
    # Of the same size as the others, so that all of them come from one place.
    return blocks[::8]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do not trim")
async def test_memory_is_returned_after_large_requests() -> None:
    for _ in range(NUM_TRIES):
        pins = leave_gaps(64)
        held = rss()
        trimmer = MemoryTrimmer(delay_s=DELAY_S)
        for _ in range(64):
            trimmer.note_freed(MIB)
        await asyncio.sleep(0)
        if is_kept_first := held - rss() < 8 * MIB:
            break
    assert is_kept_first
    async with asyncio.timeout(60):
        while held - rss() < 32 * MIB:
            await asyncio.sleep(DELAY_S)
    assert len(pins) == 80


@pytest.mark.parametrize(("num_requests", "num_bytes"), [(8, MIB), (100_000, 2**10)])
async def test_memory_of_few_or_small_requests_is_kept(num_requests: int, num_bytes: int) -> None:
    for _ in range(NUM_TRIES):
        pins = leave_gaps(64)
        held = rss()
        trimmer = MemoryTrimmer(delay_s=0.0)
        for _ in range(num_requests):
            trimmer.note_freed(num_bytes)
        await asyncio.sleep(DELAY_S)
        is_kept = held - rss() < 8 * MIB
        assert len(pins) == 80
        if is_kept:
            return
    pytest.fail("Memory was returned each time.")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators do not trim")
async def test_memory_is_returned_even_if_large_requests_go_on() -> None:
    pins = leave_gaps(64)
    held = rss()
    trimmer = MemoryTrimmer(delay_s=DELAY_S)
    async with asyncio.timeout(60):
        while held - rss() < 32 * MIB:
            trimmer.note_freed(16 * MIB)
            await asyncio.sleep(DELAY_S / 10)
    assert len(pins) == 80


async def test_large_responses_are_noted_as_freed() -> None:
    noted: list[int] = []
    buffers = OutputBuffers(BufferLimits(), note_freed=noted.append)
    buffer = buffers.open_buffer("ann")
    buffer.collect(3 * MIB)
    buffer.clear()
    buffer.clear()
    assert noted == [3 * MIB]


def test_limits_hold_for_calls_tenants_and_the_server() -> None:
    buffers = OutputBuffers(BufferLimits(3200))
    first, second = buffers.open_buffer("ann"), buffers.open_buffer("ann")
    with pytest.raises(UnreadError, match="a call may leave at most 100"):
        first.add(101)
    tenant = [buffers.open_buffer("ann") for _ in range(8)]
    for one in tenant:
        one.add(100)
    with pytest.raises(UnreadError, match="a tenant may leave at most 800"):
        second.add(1)
    with pytest.raises(OverloadedError, match="keeps 800 bytes"):
        buffers.check_room("ann")
    buffers.check_room("ben")
    for name in ("ben", "cid", "dan"):
        for _ in range(8):
            buffers.open_buffer(name).add(100)
    with pytest.raises(OverloadedError, match="memory for unread output"):
        buffers.check_room("eve")
    with pytest.raises(UnreadError, match="a server may leave at most 3200"):
        buffers.open_buffer("eve").add(1)
    for one in tenant:
        one.clear()
    buffers.check_room("ann")
    assert buffers.num_bytes == 2400

"""Bodies of many small objects are rejected before they are parsed."""

from __future__ import annotations

import json
import time
from random import Random
from typing import TYPE_CHECKING

import pytest

from cluster.serving.json_body import read_json
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.schema.body_reader import read_body
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse
from pagedray.errors import InvalidRequestError

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

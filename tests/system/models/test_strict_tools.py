"""A model that would violate the schema of a tool calls it with valid arguments if it is strict."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.small_models.scripted_model import write_scripted_model
from tests.system.server_process import ServerProcess

_FLAGS = ("--executor=local", "--dtype=float32", "--max-model-len=2048", "--num-blocks=256")
_TURNS = {
    "hermes": (
        "I look.",
        '\n<tool_call>\n{"name": "look", "arguments": ',
        '{"a": "x"}}',
        "\n</tool_call>",
    ),
    "pythonic": ("[look(", 'a="x"', " ) ]"),
    "qwen3_coder": (
        "I look.",
        "\n<tool_call>\n<function=look>\n<parameter=a>\n",
        "not a number",
        "\n</parameter>\n</function>\n</tool_call>",
    ),
}
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=sorted(_TURNS))
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, str | None]]:
    """A server, and the text that its model writes before the call."""
    folder = tmp_path_factory.mktemp("model") / "scripted"
    folder.mkdir()
    write_scripted_model(folder, [_TURNS[request.param]])
    flags = (*_FLAGS, f"--tool-call-format={request.param}")
    with ServerProcess(flags, folder) as server:
        yield server, "I look." if "I look." in _TURNS[request.param] else None


@pytest.mark.parametrize("is_strict", [False, True])
def test_arguments_are_valid_if_the_tool_is_strict(
    server: tuple[ServerProcess, str | None], *, is_strict: bool
) -> None:
    process, content = server
    function = {"name": "look", "strict": is_strict, "parameters": _PARAMETERS}
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Look."}],
        "temperature": 0,
        "max_tokens": 100,
        "tools": [{"type": "function", "function": function}],
    }
    answer = httpx.post(f"{process.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert choice["message"]["content"] == content
    (call,) = choice["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])["a"]
    assert (found in range(1, 100)) is is_strict, found
    assert choice["finish_reason"] == "tool_calls"

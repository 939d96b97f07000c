"""A model that would violate the schema of a tool calls it with valid arguments if it is strict."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.scripted_model import write_scripted_model
from tests.system.server_process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLAGS = ("--executor=local", "--dtype=float32", "--max-model-len=2048", "--num-blocks=256")
_TURN = (
    "I look.",
    '\n<tool_call>\n{"name": "look", "arguments": ',
    '{"a": "x"}}',
    "\n</tool_call>",
)
_PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("model") / "scripted"
    folder.mkdir()
    write_scripted_model(folder, [_TURN])
    with ServerProcess(_FLAGS, folder) as server:
        yield server


@pytest.mark.parametrize("is_strict", [False, True])
def test_arguments_are_valid_if_the_tool_is_strict(
    server: ServerProcess, *, is_strict: bool
) -> None:
    function = {"name": "look", "strict": is_strict, "parameters": _PARAMETERS}
    body = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Look."}],
        "temperature": 0,
        "max_tokens": 100,
        "tools": [{"type": "function", "function": function}],
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    found = json.loads(call["function"]["arguments"])["a"]
    assert found in range(1, 100) if is_strict else found == "x"
    assert choice["finish_reason"] == "tool_calls"

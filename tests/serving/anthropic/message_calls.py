"""Messages and tools of calls in Anthropic's API, and how tests send them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from tests.serving.conftest import Server

TEMPLATE = (
    "{# <tool_call> #}"
    "{% if tools %}[{{ tools | map(attribute='function.name') | join }}]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }} {% endif %}"
    "{% for message in messages %}{{ message.role }}({{ message.reasoning_content }})"
    "{{ message.tool_call_id }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}!{{ call.function.name }}"
    "{{ call.function.arguments }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
BODY: dict[str, Any] = {  # Any: JSON
    "model": "tiny",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "hi"}],
}
TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": [1, null]}}\n</tool_call>'
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"a": None}}
RESULT = {"type": "tool_result", "tool_use_id": "c1"}


def posted(server: Server, body: dict[str, Any], path: str = "messages") -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60)


def events(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data of a stream's events, each of which has its type as its name."""
    found: list[dict[str, Any]] = []
    for event in posted(server, body | {"stream": True}).text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found

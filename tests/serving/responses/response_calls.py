"""Input and tools of calls of the Responses API, and how tests send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from tests.serving.conftest import Server

TEMPLATE = (
    "{# <tool_call> #}"
    "{% if tools %}[{{ tools | map(attribute='function.name') | join }}]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }} {% endif %}"
    "{% if reasoning_effort is defined %}{{ reasoning_effort }} {% endif %}"
    "{% for message in messages %}{{ message.role }}({{ message.reasoning_content }})"
    "{{ message.tool_call_id }}={{ message.content }}"
    "{% for call in message.tool_calls or [] %}!{{ call.function.name }}"
    "{{ call.function.arguments }}{% endfor %};{% endfor %}>"
)
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
USE = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}", "id": "fc_1"}
SPACE: dict[str, Any] = {  # Any: JSON, here and below
    "type": "namespace",
    "name": "eyes",
    "description": "d",
    "tools": [TOOL],
}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "5"}


def posted(server: Server, given: dict[str, Any]) -> httpx.Response:
    body = {"model": "tiny", "max_output_tokens": 8, "input": "hi"} | given
    return httpx.post(f"{server.url}/v1/responses", json=body, timeout=60)


def create(client: Any, **given: Any) -> Any:  # the client's types are unions of many items
    return client.responses.create(model="tiny", **given)

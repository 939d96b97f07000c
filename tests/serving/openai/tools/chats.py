"""Chats with tools: their template, what the model writes, and what the engine receives."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedray.request import Request
    from tests.serving.conftest import Server

__all__ = [
    "ASK",
    "AUTO",
    "PARAMETERS",
    "TEMPLATE",
    "TOOLS",
    "prompt_of",
    "schema_of",
    "write",
]

TEMPLATE = (
    "{% if tools %}<|system|>Tools: {{ tools | tojson }} Write <tool_call>.{{ eos_token }}"
    "{% endif %}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls %}"
    "({{ call.id }} {{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% if message.tool_call_id %}[{{ message.tool_call_id }} {{ message.name }}]{% endif %}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string"}},
}
TOOLS: list[Any] = [  # Any: what the client calls a param
    {
        "type": "function",
        "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "time", "strict": None}},
]
ASK: list[Any] = [{"role": "user", "content": "How is it?"}]  # Any: as above
AUTO = (
    'I ask. <tool_call>{"name": "weather", "arguments": {"city": "K\u00f6ln \U0001f642"}}'
    '</tool_call><tool_call>{"name": "time", "arguments": {}}</tool_call>'
)


def write(server: Server, text: str) -> None:
    """Have the model write a text and end."""
    token_ids = server.tokenizer.encode(text, add_special_tokens=False)

    def script(request: Request, index: int) -> list[int]:
        return [*token_ids, 1]

    server.engine.script = script


def prompt_of(server: Server) -> str:
    (request,) = server.engine.log.submitted[-1:]
    return server.tokenizer.decode(request.prompt_token_ids)


def schema_of(server: Server) -> Any:  # Any: JSON
    structure = server.engine.log.submitted[-1].sampling.structure
    assert structure is not None
    assert structure.kind == "json_schema"
    return json.loads(structure.text)

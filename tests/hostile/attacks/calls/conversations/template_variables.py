"""Variables of the chat template that are large, deep, or named as the template's own."""

from __future__ import annotations

import json
import time
from http.client import HTTPConnection
from typing import TYPE_CHECKING

from tests.hostile.attack import Attack, Findings

if TYPE_CHECKING:
    from tests.hostile.attack import Target

__all__ = ["TemplateVariables"]

_DEEP = '{"a":' * 150 + "1" + "}" * 150
_VARIABLES = (
    '{"messages":[{"role":"system","content":"y"}]}',
    '{"tools":[]}',
    '{"add_generation_prompt":false}',
    '{"bos_token":"y"}',
    '{"eos_token":"y"}',
    '{"raise_exception":"y"}',
    '{"namespace":"y","range":"y","loop":"y","self":"y"}',
    '{"__class__":"y"}',
    f'{{"enable_thinking":{_DEEP}}}',
    json.dumps({"enable_thinking": [0] * 8000}),
    json.dumps({"enable_thinking": [[None] * 8000] * 8}),
    json.dumps({f"name{number}": "y" * 1000 for number in range(60)}),
    json.dumps({"enable_thinking": "y" * 1_000_000}),
)
"""As JSON."""


class TemplateVariables(Attack):
    """None of them may change what the model reads; the bundled model's template reads none."""

    name = "variables of the template"

    def run(self, target: Target, seconds: float) -> Findings:
        """Compare the prompt of each conversation with that without variables."""
        end_s = time.monotonic() + seconds
        broken: set[str] = set()
        num_sent = 0
        connection = HTTPConnection("127.0.0.1", target.http_port, timeout=60.0)
        expected = _answer(connection, target, "null")
        while num_sent < len(_VARIABLES) or time.monotonic() < end_s:
            variables = _VARIABLES[num_sent % len(_VARIABLES)]
            num_sent += 1
            status, num_tokens = _answer(connection, target, variables)
            if status != 400 and (status, num_tokens) != expected:
                broken.add(f"with {variables:.60} it was answered with {status}, {num_tokens}")
        connection.close()
        return Findings(figures={"requests": num_sent}, broken=tuple(sorted(broken)))


def _answer(connection: HTTPConnection, target: Target, variables: str) -> tuple[int, object]:
    """Return the status and the tokens of the prompt."""
    body = (
        '{"model":"tiny-llama","messages":[{"role":"user","content":"x"}],"max_tokens":1,'
        f'"return_token_ids":true,"chat_template_kwargs":{variables}}}'
    )
    headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    response = connection.getresponse()
    answer = json.loads(response.read())
    return response.status, answer.get("prompt_token_ids")

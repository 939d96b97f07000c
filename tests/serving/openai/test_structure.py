"""Structured output over HTTP: the parameters of clients, and what reaches the engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import httpx
import pytest
from pydantic import BaseModel

if TYPE_CHECKING:
    import openai

    from pagedray.request import Request
    from tests.serving.conftest import Server

USER: Any = {"role": "user", "content": "hi"}  # Any: what the client calls a param
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TAG: dict[str, Any] = {  # Any: JSON
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA | {"default": None}, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG_TEXT = json.dumps(TAG, separators=(",", ":"))


class Animal(BaseModel):
    """The requested output."""

    kind: Literal["fox", "dog"]
    age: int


def test_parsed_response_is_the_clients_model(openai_client: openai.OpenAI, server: Server) -> None:
    token_ids = server.tokenizer.encode('{"kind": "fox", "age": 3}', add_special_tokens=False)

    def script(request: Request, index: int) -> list[int]:
        return [*token_ids, 1]

    server.engine.script = script
    answer = openai_client.chat.completions.parse(
        model="tiny", messages=[USER], response_format=Animal
    )
    assert answer.choices[0].message.parsed == Animal(kind="fox", age=3)
    structure = server.engine.log.submitted[0].sampling.structure
    assert structure is not None
    assert structure.kind == "json_schema"
    assert json.loads(structure.text)["properties"]["age"]["type"] == "integer"


CASES: list[tuple[dict[str, Any], str, str]] = [  # Any: JSON
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
        "json_schema",
        json.dumps(SCHEMA, separators=(",", ":")),
    ),
    ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", json.dumps(SCHEMA)),
    ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
    ({"guided_choice": ["yes", "no"]}, "choice", '["yes","no"]'),
    ({"guided_grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
    ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a"]}}, "choice", '["a"]'),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, "json_schema", json.dumps(
        SCHEMA, separators=(",", ":"))),
    ({"structured_outputs": {"grammar": 'root ::= "b"'}}, "grammar", 'root ::= "b"'),
    ({"response_format": TAG}, "structural_tag", TAG_TEXT),
    ({"structured_outputs": {"structural_tag": TAG_TEXT}}, "structural_tag", TAG_TEXT),
    ({"structured_outputs": {"structural_tag": TAG}}, "structural_tag", TAG_TEXT),
]  # fmt: skip


@pytest.mark.parametrize(("body", "kind", "text"), CASES)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_structure_reaches_the_engine(
    server: Server, path: str, body: dict[str, Any], kind: str, text: str
) -> None:
    prompt = {"prompt": "x"} if path == "completions" else {"messages": [USER]}
    answer = httpx.post(
        f"{server.url}/v1/{path}", json={"model": "tiny", "max_tokens": 2, **prompt, **body}
    )
    assert answer.status_code == 200, answer.text
    structure = server.engine.log.submitted[0].sampling.structure
    assert structure is not None
    assert (structure.kind, structure.text) == (kind, text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "root ::= nothing"}, "guided_grammar"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a" * 1_000_000}, "guided_regex"),
        ({"guided_choice": ["a" * 1_000_000]}, "guided_choice"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "no type"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
def test_invalid_structure_is_rejected_by_the_clients_name_for_it(
    server: Server, body: dict[str, Any], param: str
) -> None:
    answer = httpx.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x", **body}
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "structure " not in error["message"].replace("structured", "")
    assert server.engine.log.submitted == []


def test_stop_is_included_in_the_text_on_request(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 60, "stop": " fox"}
    for wanted, text in ((False, "The quick brown"), (True, "The quick brown fox")):
        answer = http.post(
            "/v1/completions", json={**body, "include_stop_str_in_output": wanted}
        ).json()
        assert answer["choices"][0]["text"] == text


def test_special_tokens_are_included_on_request(http: httpx.Client, server: Server) -> None:
    server.engine.script = lambda request, index: [2, 3, 1]
    body = {"model": "tiny", "prompt": "x", "skip_special_tokens": False}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "<|user|><|assistant|>"

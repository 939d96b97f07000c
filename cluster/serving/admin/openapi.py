"""The OpenAPI document of the HTTP frontend, made from the models of its bodies."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.anthropic.conversation_body import CountBody, MessagesBody
from cluster.serving.json_body import BodyPart
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.score_body import EmbeddingBody, RerankBody, ScoreBody
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from cluster.serving.server_info import ServerInfo, ServerLoads
from cluster.serving.telemetry.load_history import LoadHistory
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.http.endpoint import Json
    from cluster.serving.json_body import Body

__all__ = ["openapi_document"]

_BODIES: tuple[type[Body], ...] = (
    ChatBody,
    CompletionBody,
    CountBody,
    DetokenizeBody,
    EmbeddingBody,
    MessagesBody,
    RerankBody,
    ResponsesBody,
    InputTokensBody,
    ScoreBody,
    TokenizeBody,
)
# Parts in which a null is an error.
_WITHOUT_NULLS = frozenset(("CalledFunction", "NamedFunction", "TextPart"))
_ERROR_TEXTS = {
    400: "Invalid request; `param` names the invalid field.",
    401: "Missing or invalid API key.",
    403: "The API key does not permit this call, or a page of another site sent it.",
    404: "The model or endpoint does not exist, or the stream cannot be resumed.",
    408: "The body did not arrive in time.",
    409: "The X-Request-Id is in use.",
    413: "The body is too large.",
    415: "The body is not JSON, or is compressed.",
    421: "The server has no API keys and does not accept requests for this `Host`.",
    422: "The request ended the processes that ran it and is not retried.",
    429: "The queue is full; retry after `Retry-After` seconds.",
    500: "Internal server error.",
    501: "The server does not support resumable streams.",
    503: "The server is not ready or is shutting down.",
    504: "The deadline passed.",
}
_BODY_ERRORS = {400, 401, 404, 408, 413, 415, 422, 429, 503, 504}
_PUBLIC_PATHS = ("/health", "/ping", "/ready")
_JSON = "application/json"
_EVENTS = "text/event-stream"
_NULL: Json = {"type": "null"}
_OPERATIONS = Path(__file__).with_name("operations.toml")


@cache
def openapi_document() -> Json:
    """Return the OpenAPI document, which all servers of a process share."""
    # Any: TOML.
    operations: list[dict[str, Any]] = tomllib.loads(_OPERATIONS.read_text())["operations"]
    paths: dict[str, dict[str, Json]] = {}
    for operation in operations:
        for name, place in operation["paths"].items():
            method, _, path = place.partition(" ")
            described = {"operationId": name, **_operation(operation, method, path)}
            paths.setdefault(path, {})[method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PagedRay",
            "version": __version__,
            "description": "OpenAI's API with vLLM's additional parameters. Parameters that are "
            "not listed are rejected; other fields of messages and tools are ignored. If the "
            "server has a key file, requests need the header `Authorization: Bearer KEY`.",
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


# Any: TOML.
def _operation(operation: dict[str, Any], method: str, path: str) -> Json:
    described: Json = {
        "summary": operation["summary"],
        "tags": [operation.get("tag", "Server")],
        "responses": _responses(operation, method, path),
    }
    if body := operation.get("body"):
        described["requestBody"] = {
            "required": True,
            "content": {_JSON: {"schema": _reference(body)}},
        }
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    for name, parameter in operation.get("parameters", {}).items():
        kind = parameter["type"]
        schema = {"type": kind, "minimum": 0} if kind == "integer" else {"type": kind}
        rest = {key: value for key, value in parameter.items() if key != "type"}
        parameters.append({"name": name, **rest, "schema": schema})
    if parameters:
        described["parameters"] = parameters
    if path in _PUBLIC_PATHS:
        described["security"] = []
    return described


# Any: TOML.
def _responses(operation: dict[str, Any], method: str, path: str) -> Json:
    """Return the responses by status; the default errors depend on the kind of the operation."""
    media_type = operation.get("media_type", _JSON)
    content: Json = {} if media_type == _JSON else {media_type: {"schema": {"type": "string"}}}
    if media_type == _JSON or "body" in operation:
        content[_JSON] = {"schema": _reference(operation.get("schema", "Anything"))}
    responses: Json = {"200": {"description": operation["response"], "content": content}}
    # These answer pages of other sites, whatever they request.
    errors = {403, 421, 500, *operation.get("errors", ())}
    if path in _PUBLIC_PATHS:
        errors.add(503)
    elif "body" in operation:
        errors |= _BODY_ERRORS
        errors |= {409, 501} if media_type == _EVENTS else set()
    else:
        errors |= {401, 404} if "{" in path and method != "DELETE" else {401}
    error = _reference("AnthropicError" if operation.get("tag") == "Anthropic" else "Error")
    for status in sorted(errors):
        responses[str(status)] = {
            "description": _ERROR_TEXTS[status],
            "content": {_JSON: {"schema": error}},
        }
    if "Last-Event-ID" in operation.get("parameters", {}):
        responses["204"] = {"description": "No further event follows."}
    return responses


def _schemas() -> Json:
    schemas: Json = {}
    kinds = {kind.__name__: kind for kind in _kinds_below(BodyPart)}
    waiting = [body.__name__ for body in _BODIES]
    while waiting:
        name = waiting.pop()
        if name in schemas or name not in kinds:
            continue
        written = kinds[name].model_json_schema(ref_template="#/components/schemas/{model}")
        found = {**written.pop("$defs", {}), name: written}
        for part, schema in found.items():
            schemas[part] = _cleaned(schema, has_nulls=part not in _WITHOUT_NULLS)
        waiting += re.findall(
            r"'#/components/schemas/(\w+)'", str([schemas[part] for part in found])
        )
    for body in _BODIES:
        schema = schemas[body.__name__]
        assert isinstance(schema, dict)
        for name, values in body.defaults.items():
            schema["properties"][name] = {
                "enum": [*values, None],
                "description": "Not supported; only values without effect are accepted.",
            }
        for name, reason in body.ignored.items():
            schema["properties"][name] = {"description": f"Ignored: {reason}."}
    return {**dict(sorted(schemas.items())), **_RESPONSE_SCHEMAS}


def _kinds_below(kind: type[BodyPart]) -> Iterator[type[BodyPart]]:
    for below in kind.__subclasses__():
        yield below
        yield from _kinds_below(below)


def _cleaned(schema: Json, *, has_nulls: bool) -> Json:
    schema = _resolved(schema)
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    assert isinstance(required, list)
    assert isinstance(properties, dict)
    cleaned = {name: value for name, value in schema.items() if name != "title"}
    cleaned["properties"] = {
        name: _property(one, is_nullable=has_nulls and name not in required)
        for name, one in properties.items()
    }
    return cleaned


def _resolved(value: Any) -> Any:  # Any: JSON
    """Return a schema with its placeholders of parts replaced by references."""
    if isinstance(value, list):
        return [_resolved(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "x-part" in value:
        rest = {name: one for name, one in value.items() if name != "x-part"}
        return {**rest, **_reference(value["x-part"])}
    return {name: _resolved(one) for name, one in value.items()}


def _property(schema: Json, *, is_nullable: bool) -> Json:
    kept = {name: value for name, value in schema.items() if name != "title"}
    if kept.get("default", 0) in (None, []):
        del kept["default"]
    if not is_nullable:
        return kept
    variants = kept.get("anyOf")
    if isinstance(variants, list):
        return kept if _NULL in variants else {**kept, "anyOf": [*variants, _NULL]}
    outer: Json = {name: kept.pop(name) for name in ("description", "default") if name in kept}
    return {"anyOf": [kept, _NULL], **outer}


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}


def _object(**properties: Json) -> Json:
    return _open_object((), **properties)


def _open_object(optional: tuple[str, ...], **properties: Json) -> Json:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _nullable(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _const(value: str) -> Json:
    return {"const": value}


_FINISH = _nullable({"enum": ["stop", "length", "tool_calls", "function_call", "abort"]})
_STOP = _nullable({"type": ["string", "integer"]})
_ANY_OBJECT: Json = {"type": "object"}

_, _RECORDS = msgspec.json.schema_components(
    (ServerInfo, ServerLoads, LoadHistory), ref_template="#/components/schemas/{name}"
)

_RESPONSE_SCHEMAS: Json = {
    "Anything": _ANY_OBJECT,
    "ChatChoice": _object(
        index=_COUNT,
        message=_open_object(
            ("tool_calls", "function_call"),
            role=_const("assistant"),
            content=_nullable(_STRING),
            refusal=_nullable(_STRING),
            tool_calls=_list(_reference("ToolCall")),
            function_call=_reference("CalledFunction"),
        ),
        logprobs=_nullable(_ANY_OBJECT),
        finish_reason=_FINISH,
        stop_reason=_STOP,
    ),
    "ChatCompletion": _object(
        id=_STRING,
        object=_const("chat.completion"),
        created=_COUNT,
        model=_STRING,
        choices=_list(_reference("ChatChoice")),
        usage=_reference("Usage"),
    ),
    "Completion": _object(
        id=_STRING,
        object=_const("text_completion"),
        created=_COUNT,
        model=_STRING,
        choices=_list(_reference("CompletionChoice")),
        usage=_reference("Usage"),
    ),
    "CompletionChoice": _object(
        index=_COUNT,
        text=_STRING,
        logprobs=_nullable(_ANY_OBJECT),
        finish_reason=_FINISH,
        stop_reason=_STOP,
    ),
    "DeletedStream": _object(id=_STRING, object=_const("stream"), deleted={"const": True}),
    "DetokenizedText": _object(prompt=_STRING),
    "Embedding": _object(
        object=_const("embedding"),
        index=_COUNT,
        embedding={"anyOf": [_list({"type": "number"}), _STRING]},
    ),
    "EmbeddingList": _object(
        object=_const("list"),
        data=_list(_reference("Embedding")),
        model=_STRING,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Pooling": _object(
        object=_const("pooling"), index=_COUNT, data={"anyOf": [_list({"type": "number"}), _STRING]}
    ),
    "PoolingList": _object(
        object=_const("list"),
        data=_list(_reference("Pooling")),
        model=_STRING,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "AnthropicError": _object(
        type=_const("error"),
        error=_object(type=_STRING, message=_STRING),
        request_id=_nullable(_STRING),
    ),
    "Error": _object(
        error=_object(
            message=_STRING, type=_STRING, param=_nullable(_STRING), code=_nullable(_STRING)
        )
    ),
    "Model": _object(
        id=_STRING, object=_const("model"), created=_COUNT, owned_by=_STRING, max_model_len=_COUNT
    ),
    "ModelList": _object(object=_const("list"), data=_list(_reference("Model"))),
    "RankedDocument": _open_object(
        ("document",),
        index=_COUNT,
        relevance_score={"type": "number"},
        document=_object(text=_STRING),
    ),
    "Ranking": _object(
        id=_STRING,
        model=_STRING,
        usage=_object(total_tokens=_COUNT),
        results=_list(_reference("RankedDocument")),
    ),
    "Score": _object(object=_const("score"), index=_COUNT, score={"type": "number"}),
    "ScoreList": _object(
        id=_STRING,
        object=_const("list"),
        created=_COUNT,
        model=_STRING,
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
        data=_list(_reference("Score")),
    ),
    "Status": _object(status=_const("ok")),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list(_COUNT),
        token_strs={
            "type": ["array", "null"],
            "items": {"type": ["string", "null"]},
            "description": "Null without `return_token_strs`.",
        },
    ),
    "ToolCall": _object(
        id=_STRING, type=_const("function"), function=_object(name=_STRING, arguments=_STRING)
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    **_RECORDS,
}

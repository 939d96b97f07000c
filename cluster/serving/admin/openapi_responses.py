"""The schemas of responses in the OpenAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.serving.server_info import ServerInfo, ServerLoads
from cluster.serving.telemetry.load_history import LoadHistory

if TYPE_CHECKING:
    from cluster.serving.http.errors import Json

__all__ = ["RESPONSE_SCHEMAS"]

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


def _reference(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_FINISH = _nullable({"enum": ["stop", "length", "tool_calls", "function_call", "abort"]})
_STOP = _nullable({"type": ["string", "integer"]})
_ANY_OBJECT: Json = {"type": "object"}

_, _RECORDS = msgspec.json.schema_components(
    (ServerInfo, ServerLoads, LoadHistory), ref_template="#/components/schemas/{name}"
)

RESPONSE_SCHEMAS: Json = {
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
        object=_const("pooling"),
        index=_COUNT,
        data={"anyOf": [_list({"type": "number"}), _STRING]},
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
            message=_STRING,
            type=_STRING,
            param=_nullable(_STRING),
            code=_nullable(_STRING),
        )
    ),
    "Model": _object(
        id=_STRING,
        object=_const("model"),
        created=_COUNT,
        owned_by=_STRING,
        max_model_len=_COUNT,
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
        id=_STRING,
        type=_const("function"),
        function=_object(name=_STRING, arguments=_STRING),
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    **_RECORDS,
}

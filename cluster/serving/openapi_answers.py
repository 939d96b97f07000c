"""What each endpoint answers, for the OpenAPI document."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.serving.openai_error import Json

__all__ = ["ANSWER_SCHEMAS", "OPERATIONS", "Operation"]

_JSON = "application/json"
_EVENTS = "text/event-stream"
_BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
_STRING: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_FLAG: Json = {"type": "boolean"}
_SECONDS: Json = {"type": "number"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One endpoint, as the document describes it."""

    id: str
    method: str
    path: str
    tag: str
    summary: str
    answer_text: str
    answers: tuple[tuple[str, str], ...]
    """Media types and the schemas of what they carry; no schema is any text."""
    body: str | None = None
    parameter: str | None = None
    errors: tuple[int, ...] = (401, 403, 500)
    is_open: bool = False


OPERATIONS = (
    Operation(
        id="createChatCompletion",
        method="POST",
        path="/v1/chat/completions",
        tag="OpenAI",
        summary="Go on with a conversation.",
        answer_text="The assistant's turn; with stream = true, its chunks as server-sent events.",
        answers=((_JSON, "ChatCompletion"), (_EVENTS, "")),
        body="ChatBody",
        errors=_BODY_ERRORS,
    ),
    Operation(
        id="createCompletion",
        method="POST",
        path="/v1/completions",
        tag="OpenAI",
        summary="Continue texts.",
        answer_text="The continuations; with stream = true, their chunks as server-sent events.",
        answers=((_JSON, "Completion"), (_EVENTS, "")),
        body="CompletionBody",
        errors=_BODY_ERRORS,
    ),
    Operation(
        id="createEmbedding",
        method="POST",
        path="/v1/embeddings",
        tag="OpenAI",
        summary="Make vectors of texts.",
        answer_text="The vectors, in the order of the texts.",
        answers=((_JSON, "EmbeddingList"),),
        body="EmbeddingBody",
        errors=_BODY_ERRORS,
    ),
    Operation(
        id="listModels",
        method="GET",
        path="/v1/models",
        tag="OpenAI",
        summary="List the models that are served.",
        answer_text="The one model.",
        answers=((_JSON, "ModelList"),),
    ),
    Operation(
        id="retrieveModel",
        method="GET",
        path="/v1/models/{model}",
        tag="OpenAI",
        summary="Tell of one model.",
        answer_text="The model.",
        answers=((_JSON, "Model"),),
        parameter="model",
        errors=(401, 403, 404, 500),
    ),
    Operation(
        id="tokenize",
        method="POST",
        path="/tokenize",
        tag="Tokens",
        summary="Return the token ids of a text or a conversation.",
        answer_text="The token ids.",
        answers=((_JSON, "Tokens"),),
        body="TokenizeBody",
        errors=_BODY_ERRORS,
    ),
    Operation(
        id="detokenize",
        method="POST",
        path="/detokenize",
        tag="Tokens",
        summary="Return the text of token ids, special tokens written out.",
        answer_text="The text.",
        answers=((_JSON, "DetokenizedText"),),
        body="DetokenizeBody",
        errors=_BODY_ERRORS,
    ),
    Operation(
        id="getHealth",
        method="GET",
        path="/health",
        tag="Server",
        summary="Tell whether the process is worth keeping: it answers and its engine has not "
        "failed for good. For liveness probes.",
        answer_text="It is.",
        answers=((_JSON, "Status"),),
        errors=(500, 503),
        is_open=True,
    ),
    Operation(
        id="getReady",
        method="GET",
        path="/ready",
        tag="Server",
        summary="Tell whether requests are taken and make progress: not before the model is "
        "loaded, while ranks are replaced, or while the server drains. For readiness probes.",
        answer_text="They are.",
        answers=((_JSON, "Status"),),
        errors=(500, 503),
        is_open=True,
    ),
    Operation(
        id="getMetrics",
        method="GET",
        path="/metrics",
        tag="Server",
        summary="Tell Prometheus what the server counts. Needs the key of an admin.",
        answer_text="The metrics in Prometheus' text format.",
        answers=(("text/plain", ""),),
    ),
    Operation(
        id="getLoads",
        method="GET",
        path="/loads",
        tag="Server",
        summary="Tell what the server has to do, and of the caller's own running calls.",
        answer_text="The loads of this moment.",
        answers=((_JSON, "Loads"),),
        errors=(401, 403, 500, 503),
    ),
    Operation(
        id="getOpenapi",
        method="GET",
        path="/openapi.json",
        tag="Server",
        summary="Return this document.",
        answer_text="The document.",
        answers=((_JSON, "Anything"),),
    ),
    Operation(
        id="getDocs",
        method="GET",
        path="/docs",
        tag="Server",
        summary="Return this document as a page.",
        answer_text="The page, which needs nothing else and runs no scripts.",
        answers=(("text/html", ""),),
    ),
)


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


_COUNTS = (
    "num_running",
    "num_waiting",
    "num_swapped",
    "num_queued_requests",
    "num_queued_tokens",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_cpu_blocks",
    "num_free_cpu_blocks",
    "num_steps",
    "num_prompt_tokens",
    "num_generated_tokens",
    "num_queried_tokens",
    "num_hit_tokens",
    "num_preemptions",
)
_FINISH = _nullable({"enum": ["stop", "length", "tool_calls", "abort"]})
_STOP = _nullable({"type": ["string", "integer"]})
_ANY_OBJECT: Json = {"type": "object"}

ANSWER_SCHEMAS: Json = {
    "Anything": _ANY_OBJECT,
    "ChatChoice": _object(
        index=_COUNT,
        message=_open_object(
            ("tool_calls",),
            role=_const("assistant"),
            content=_nullable(_STRING),
            refusal=_nullable(_STRING),
            tool_calls=_list(_reference("ToolCall")),
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
    "Error": _object(
        error=_object(
            message=_STRING,
            type=_STRING,
            param=_nullable(_STRING),
            code=_nullable(_STRING),
        )
    ),
    "Loads": _object(
        is_ready=_FLAG,
        uptime_s=_SECONDS,
        last_step_s=_SECONDS,
        **dict.fromkeys(_COUNTS, _COUNT),
        calls=_list(
            _object(
                id=_STRING,
                tenant=_STRING,
                age_s=_SECONDS,
                num_prompt_tokens=_COUNT,
                num_generated_tokens=_COUNT,
            )
        ),
    ),
    "Model": _object(
        id=_STRING,
        object=_const("model"),
        created=_COUNT,
        owned_by=_STRING,
        max_model_len=_COUNT,
    ),
    "ModelList": _object(object=_const("list"), data=_list(_reference("Model"))),
    "Status": _object(status=_const("ok")),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_list(_COUNT),
        token_strs={"type": "null"},
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
}

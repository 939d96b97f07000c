"""The OpenAPI document of the HTTP frontend, made from the models of its bodies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cluster.serving.admin.openapi_operations import OPERATIONS, ApiOperation
from cluster.serving.admin.openapi_responses import RESPONSE_SCHEMAS
from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.anthropic.blocks import BLOCKS
from cluster.serving.anthropic.conversation_body import AnthropicTool, OutputConfig
from cluster.serving.anthropic.messages_body import CountBody, MessagesBody, OutputFormat
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.embedding_body import EmbeddingBody
from cluster.serving.openai.bodies.generation_body import StreamOptions
from cluster.serving.openai.bodies.messages import (
    CONTENT_PARTS,
    CalledFunction,
    Message,
    MessageCall,
)
from cluster.serving.openai.bodies.sampling_fields import (
    JsonSchemaFormat,
    ResponseFormat,
    StructuredOutputs,
)
from cluster.serving.openai.bodies.score_body import DocumentObject, RerankBody, ScoreBody
from cluster.serving.openai.bodies.tool_fields import (
    AllowedTools,
    AllowedToolsChoice,
    Function,
    NamedFunction,
    ToolChoiceObject,
    ToolObject,
)
from cluster.serving.responses.input_body import TextConfig
from cluster.serving.responses.items import ITEMS, FunctionTool, NamespaceTool
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from pagedray.version import __version__

if TYPE_CHECKING:
    from cluster.serving.http.errors import Json
    from cluster.serving.schema.body import Body, BodyPart

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
_PARTS: tuple[type[BodyPart], ...] = (
    *BLOCKS.values(),
    *ITEMS.values(),
    FunctionTool,
    NamespaceTool,
    TextConfig,
    AnthropicTool,
    OutputConfig,
    OutputFormat,
    CalledFunction,
    DocumentObject,
    Function,
    JsonSchemaFormat,
    Message,
    MessageCall,
    NamedFunction,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    *dict.fromkeys(CONTENT_PARTS.values()),
    AllowedTools,
    AllowedToolsChoice,
    ToolChoiceObject,
    ToolObject,
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
_NULL: Json = {"type": "null"}


def openapi_document() -> Json:
    """Return the OpenAPI document."""
    paths: dict[str, dict[str, Json]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation)
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


def _operation(operation: ApiOperation) -> Json:
    written: Json = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        schema = _reference(operation.body)
        written["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if parameters := _parameters(operation):
        written["parameters"] = parameters
    if operation.is_public:
        written["security"] = []
    return written


def _responses(operation: ApiOperation) -> Json:
    content: Json = {
        media_type: {"schema": _reference(name) if name else {"type": "string"}}
        for media_type, name in operation.contents
    }
    responses: Json = {"200": {"description": operation.response_text, "content": content}}
    # These answer pages of other sites, whatever they request.
    for status in sorted({*operation.errors, 403, 421}):
        error = _reference(operation.error_schema)
        responses[str(status)] = {
            "description": _ERROR_TEXTS[status],
            "content": {"application/json": {"schema": error}},
        }
    if operation.empty_text is not None:
        responses["204"] = {"description": operation.empty_text}
    return responses


def _parameters(operation: ApiOperation) -> list[Json]:
    parameters: list[Json] = []
    if operation.parameter is not None:
        parameters.append(
            {
                "name": operation.parameter,
                "in": "path",
                "required": True,
                "schema": {"type": "string", "minLength": 1},
            }
        )
    for one in operation.others:
        bounds = {"minimum": 0} if one.kind == "integer" else {}
        parameters.append(
            {
                "name": one.name,
                "in": one.place,
                "description": one.text,
                "schema": {"type": one.kind, **bounds},
            }
        )
    return parameters


def _schemas() -> Json:
    schemas: Json = {}
    for kind in (*_PARTS, *_BODIES):
        written = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        found = {**written.pop("$defs", {}), kind.__name__: written}
        for name, schema in found.items():
            schemas[name] = _cleaned(schema, has_nulls=name not in _WITHOUT_NULLS)
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
    return {**dict(sorted(schemas.items())), **RESPONSE_SCHEMAS}


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

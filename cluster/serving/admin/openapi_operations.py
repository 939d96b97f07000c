"""The endpoints of the HTTP frontend, as the OpenAPI document describes them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPERATIONS", "Operation"]

_JSON = "application/json"
_EVENTS = "text/event-stream"
_BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)


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
        summary="Tell what the server has to do, and of the caller's own running calls. Sums "
        "over all tenants are 0 without the key of an admin.",
        answer_text="The loads of this moment.",
        answers=((_JSON, "ServerLoads"),),
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

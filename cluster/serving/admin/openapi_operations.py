"""The operations of the OpenAPI document, for each documented endpoint."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OPERATIONS", "ApiOperation", "ApiParameter"]

_JSON = "application/json"
_EVENTS = "text/event-stream"
_BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, 503, 504)
_GENERATION_ERRORS = (*_BODY_ERRORS, 409, 501)


@dataclass(frozen=True, slots=True)
class ApiParameter:
    """A parameter that may be absent."""

    place: str
    name: str
    text: str
    kind: str = "integer"
    """The JSON type of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiOperation:
    """The documentation of one endpoint."""

    id: str
    method: str = "GET"
    path: str
    tag: str = "Server"
    summary: str
    response_text: str
    contents: tuple[tuple[str, str], ...]
    """Media types and the names of their schemas; an empty name is any text."""
    body: str | None = None
    parameter: str | None = None
    """The parameter in its path."""
    others: tuple[ApiParameter, ...] = ()
    """Parameters in the header or the query."""
    empty_text: str | None = None
    """Describes the response without content, status 204, if any."""
    errors: tuple[int, ...] = (401, 403, 500)
    error_schema: str = "Error"
    is_public: bool = False


_AT_END = "No further event follows."
_LAST_EVENT = ApiParameter(
    "header", "Last-Event-ID", "Resumes the stream of X-Request-Id after the event with this id."
)

OPERATIONS = (
    ApiOperation(
        id="createChatCompletion",
        method="POST",
        path="/v1/chat/completions",
        tag="OpenAI",
        summary="Generate the next message of a conversation.",
        response_text="The completion; with stream = true, its chunks as server-sent events.",
        contents=((_JSON, "ChatCompletion"), (_EVENTS, "")),
        body="ChatBody",
        others=(_LAST_EVENT,),
        empty_text=_AT_END,
        errors=_GENERATION_ERRORS,
    ),
    ApiOperation(
        id="createCompletion",
        method="POST",
        path="/v1/completions",
        tag="OpenAI",
        summary="Generate completions of texts.",
        response_text="The completion; with stream = true, its chunks as server-sent events.",
        contents=((_JSON, "Completion"), (_EVENTS, "")),
        body="CompletionBody",
        others=(_LAST_EVENT,),
        empty_text=_AT_END,
        errors=_GENERATION_ERRORS,
    ),
    ApiOperation(
        id="createResponse",
        method="POST",
        path="/v1/responses",
        tag="OpenAI",
        summary="Generate a response in the format of OpenAI's Responses API.",
        response_text="The response; with stream = true, its events as server-sent events.",
        contents=((_JSON, "Anything"), (_EVENTS, "")),
        body="ResponsesBody",
        errors=_GENERATION_ERRORS,
    ),
    ApiOperation(
        id="countInputTokens",
        method="POST",
        path="/v1/responses/input_tokens",
        tag="OpenAI",
        summary="Count the tokens of the prompt that a response would be generated from.",
        response_text="`input_tokens`.",
        contents=((_JSON, "Anything"),),
        body="InputTokensBody",
        errors=_BODY_ERRORS,
    ),
    ApiOperation(
        id="listInputItems",
        path="/v1/responses/{response_id}/input_items",
        tag="OpenAI",
        summary="List the items that a stored response was generated from, including those of the "
        "responses that it continues.",
        response_text="A page of items: `data`, `first_id`, `last_id` and `has_more`.",
        contents=((_JSON, "Anything"),),
        parameter="response_id",
        others=(
            ApiParameter(
                "query", "limit", "Maximum number of items, from 1 to 100; 20 by default."
            ),
            ApiParameter("query", "after", "The id of the item before the first one.", "string"),
            ApiParameter("query", "order", "`asc`, or `desc`, the default.", "string"),
        ),
        errors=(400, 401, 403, 404, 500),
    ),
    ApiOperation(
        id="cancelResponse",
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        tag="OpenAI",
        summary="Always rejected: responses are not generated in the background.",
        response_text="None.",
        contents=((_JSON, "Anything"),),
        parameter="response_id",
        errors=(400, 401, 403, 404, 500),
    ),
    ApiOperation(
        id="getResponse",
        path="/v1/responses/{response_id}",
        tag="OpenAI",
        summary="Return a stored response.",
        response_text="The response.",
        contents=((_JSON, "Anything"),),
        parameter="response_id",
        errors=(400, 401, 403, 404, 500),
    ),
    ApiOperation(
        id="deleteResponse",
        method="DELETE",
        path="/v1/responses/{response_id}",
        tag="OpenAI",
        summary="Delete a stored response; responses that continue it are kept.",
        response_text="`id` and `deleted`.",
        contents=((_JSON, "Anything"),),
        parameter="response_id",
        errors=(401, 403, 404, 500),
    ),
    ApiOperation(
        id="createMessage",
        method="POST",
        path="/v1/messages",
        tag="Anthropic",
        summary="Generate the next message of a conversation, in Anthropic's format. Errors have "
        "Anthropic's format, too.",
        response_text="The message; with stream = true, its events as server-sent events.",
        contents=((_JSON, "Anything"), (_EVENTS, "")),
        body="MessagesBody",
        errors=_GENERATION_ERRORS,
        error_schema="AnthropicError",
    ),
    ApiOperation(
        id="countTokens",
        method="POST",
        path="/v1/messages/count_tokens",
        tag="Anthropic",
        summary="Count the tokens of a conversation.",
        response_text="`input_tokens`, the number of tokens.",
        contents=((_JSON, "Anything"),),
        body="CountBody",
        errors=_GENERATION_ERRORS,
        error_schema="AnthropicError",
    ),
    ApiOperation(
        id="createEmbedding",
        method="POST",
        path="/v1/embeddings",
        tag="OpenAI",
        summary="Embed texts.",
        response_text="The embeddings, in the order of the texts.",
        contents=((_JSON, "EmbeddingList"),),
        body="EmbeddingBody",
        errors=_BODY_ERRORS,
    ),
    ApiOperation(
        id="createPooling",
        method="POST",
        path="/pooling",
        tag="vLLM",
        summary="Embed texts, in the format of vLLM.",
        response_text="The vectors, in the order of the texts.",
        contents=((_JSON, "PoolingList"),),
        body="EmbeddingBody",
        errors=_BODY_ERRORS,
    ),
    *(
        ApiOperation(
            id=f"rerank{name}",
            method="POST",
            path=path,
            tag="Scores",
            summary="Sort documents by their relevance to a query, as Jina's and Cohere's APIs do.",
            response_text="The most relevant documents first.",
            contents=((_JSON, "Ranking"),),
            body="RerankBody",
            errors=_BODY_ERRORS,
        )
        for name, path in (("", "/rerank"), ("V1", "/v1/rerank"), ("V2", "/v2/rerank"))
    ),
    *(
        ApiOperation(
            id=f"score{name}",
            method="POST",
            path=path,
            tag="Scores",
            summary="Score pairs of texts, as vLLM's API does.",
            response_text="The scores, in the order of the pairs.",
            contents=((_JSON, "ScoreList"),),
            body="ScoreBody",
            errors=_BODY_ERRORS,
        )
        for name, path in (("", "/score"), ("V1", "/v1/score"))
    ),
    ApiOperation(
        id="resumeStream",
        path="/v1/streams/{request_id}",
        tag="Streams",
        summary="Resume a stream that was requested with stream_options.resumable, after its "
        "connection was cut. If another response still reads the stream, that response "
        "ends with an error.",
        response_text="The events after Last-Event-ID, or all events without it.",
        contents=((_EVENTS, ""),),
        parameter="request_id",
        others=(
            ApiParameter("header", "Last-Event-ID", "The id of the last event received."),
            ApiParameter(
                "query", "starting_after", "The same as the header, which takes precedence."
            ),
        ),
        empty_text=_AT_END,
        errors=(400, 401, 403, 404, 500, 501),
    ),
    ApiOperation(
        id="deleteStream",
        method="DELETE",
        path="/v1/streams/{request_id}",
        tag="Streams",
        summary="Abort a running request by its X-Request-Id, and delete its stream.",
        response_text="The request is not running, whether or not it ever was.",
        contents=((_JSON, "DeletedStream"),),
        parameter="request_id",
        errors=(401, 403, 500),
    ),
    ApiOperation(
        id="listModels",
        path="/v1/models",
        tag="OpenAI",
        summary="List the served models.",
        response_text="The list, with an entry for each name of the model.",
        contents=((_JSON, "ModelList"),),
    ),
    ApiOperation(
        id="retrieveModel",
        path="/v1/models/{model}",
        tag="OpenAI",
        summary="Retrieve one model.",
        response_text="The model.",
        contents=((_JSON, "Model"),),
        parameter="model",
        errors=(401, 403, 404, 500),
    ),
    ApiOperation(
        id="tokenize",
        method="POST",
        path="/tokenize",
        tag="Tokens",
        summary="Tokenize a text or a conversation.",
        response_text="The token ids.",
        contents=((_JSON, "Tokens"),),
        body="TokenizeBody",
        errors=_BODY_ERRORS,
    ),
    ApiOperation(
        id="detokenize",
        method="POST",
        path="/detokenize",
        tag="Tokens",
        summary="Detokenize token ids, including special tokens.",
        response_text="The text.",
        contents=((_JSON, "DetokenizedText"),),
        body="DetokenizeBody",
        errors=_BODY_ERRORS,
    ),
    ApiOperation(
        id="getHealth",
        path="/health",
        summary="Check liveness: the model is loaded and the engine has not failed permanently.",
        response_text="The server is alive.",
        contents=((_JSON, "Status"),),
        errors=(500, 503),
        is_public=True,
    ),
    *(
        ApiOperation(
            id=f"{method.lower()}Ping",
            method=method,
            path="/ping",
            summary="The same as /health, under the name that SageMaker uses.",
            response_text="The server is alive.",
            contents=((_JSON, "Status"),),
            errors=(500, 503),
            is_public=True,
        )
        for method in ("GET", "POST")
    ),
    ApiOperation(
        id="getVersion",
        path="/version",
        summary="Return the version of the server.",
        response_text="The version.",
        contents=((_JSON, "Anything"),),
    ),
    ApiOperation(
        id="getLoad",
        path="/load",
        summary="Return the number of running calls, as vLLM does: the tenant's, or all with the "
        "API key of an admin.",
        response_text="`server_load`, the number of running calls.",
        contents=((_JSON, "Anything"),),
        errors=(401, 403, 500, 503),
    ),
    ApiOperation(
        id="getReady",
        path="/ready",
        summary="Check readiness: requests are accepted and make progress. The server is not "
        "ready while it loads the model, replaces ranks or drains.",
        response_text="The server is ready.",
        contents=((_JSON, "Status"),),
        errors=(500, 503),
        is_public=True,
    ),
    ApiOperation(
        id="getMetrics",
        path="/metrics",
        summary="Return Prometheus metrics. Requires the API key of an admin.",
        response_text="The metrics in Prometheus text format.",
        contents=(("text/plain", ""),),
    ),
    ApiOperation(
        id="getLoads",
        path="/loads",
        summary="Return the current load and the tenant's running calls. Totals of all tenants are "
        "0 without the API key of an admin.",
        response_text="The current loads.",
        contents=((_JSON, "ServerLoads"),),
        errors=(401, 403, 500, 503),
    ),
    ApiOperation(
        id="getLoadHistory",
        path="/loads/history",
        summary="Return the load of the last ten minutes, with a sample every five seconds, and "
        "the latencies of the last minute. Requires the API key of an admin.",
        response_text="The last ten minutes.",
        contents=((_JSON, "LoadHistory"),),
    ),
    ApiOperation(
        id="getServerInfo",
        path="/server_info",
        summary="Return the version, the model and the hardware that it runs on.",
        response_text="The static properties of the server.",
        contents=((_JSON, "ServerInfo"),),
        errors=(401, 403, 500, 503),
    ),
    ApiOperation(
        id="getOpenapi",
        path="/openapi.json",
        summary="Return this document.",
        response_text="The document.",
        contents=((_JSON, "Anything"),),
    ),
    ApiOperation(
        id="getDocs",
        path="/docs",
        summary="Return this document as an HTML page.",
        response_text="The page, without scripts or external resources.",
        contents=(("text/html", ""),),
    ),
)

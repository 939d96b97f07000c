"""The endpoints of the server itself: health, metrics, tokenization, documentation, web page."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from cluster.serving.admin.openapi import openapi_document
from cluster.serving.admin.openapi_page import PAGE_HEADERS, openapi_page
from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.admin.web_page import page_routes
from cluster.serving.http.endpoint import HEALTHY, Access, Endpoint, json_response
from cluster.serving.schema.field_errors import renamed
from pagedray.errors import EngineError, InvalidRequestError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.inputs import TokenizeInput
    from cluster.serving.servicer import Servicer

__all__ = ["server_endpoints"]


def server_endpoints(servicer: Servicer) -> tuple[Endpoint, ...]:
    """Return the endpoints of the server itself, including the files of its web page."""
    handlers = _ServerHandlers(servicer)
    public, admins = Access.PUBLIC, Access.ADMINS
    return (
        *(
            Endpoint(method="GET", path=path, handler=handler, access=public, is_health_check=True)
            for path, handler in (
                ("/health", handlers.health),
                ("/ready", handlers.ready),
                ("/ping", handlers.health),
            )
        ),
        Endpoint(method="POST", path="/ping", handler=handlers.health, access=public),
        Endpoint(method="GET", path="/version", handler=handlers.version),
        Endpoint(method="GET", path="/load", handler=handlers.load),
        Endpoint(method="GET", path="/metrics", handler=handlers.metrics, access=admins),
        Endpoint(method="GET", path="/loads", handler=handlers.loads),
        Endpoint(method="GET", path="/loads/history", handler=handlers.load_history, access=admins),
        Endpoint(method="GET", path="/server_info", handler=handlers.info),
        Endpoint(method="POST", path="/tokenize", handler=handlers.tokenize, is_counted=True),
        Endpoint(method="POST", path="/detokenize", handler=handlers.detokenize, is_counted=True),
        Endpoint(method="GET", path="/openapi.json", handler=handlers.openapi),
        Endpoint(method="GET", path="/docs", handler=handlers.docs),
        *(
            Endpoint(method="GET", path=route.path, handler=_file(route.endpoint), access=public)
            for route in page_routes()
        ),
    )


class _ServerHandlers:
    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._document = openapi_document()
        self._page = openapi_page(self._document)

    def is_alive(self) -> bool:
        return self._servicer.is_alive

    def is_ready(self) -> bool:
        return self._servicer.is_ready

    async def health(self, call: HttpCall) -> Response:
        if self._servicer.client.has_failed:
            raise EngineError("The engine has failed permanently; see the server log.")
        if not self.is_alive():
            raise EngineError("The model is not loaded yet.")
        return json_response(HEALTHY)

    async def ready(self, call: HttpCall) -> Response:
        if not self.is_ready():
            raise EngineError("The server is not ready.")
        return json_response(HEALTHY)

    async def metrics(self, call: HttpCall) -> Response:
        return Response(self._servicer.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def loads(self, call: HttpCall) -> Response:
        return json_response(self._servicer.loads(call.tenant))

    async def load_history(self, call: HttpCall) -> Response:
        return json_response(self._servicer.load_history())

    async def info(self, call: HttpCall) -> Response:
        return json_response(self._servicer.info())

    async def version(self, call: HttpCall) -> Response:
        return json_response({"version": __version__})

    async def load(self, call: HttpCall) -> Response:
        return json_response({"server_load": self._servicer.num_calls_of(call.tenant)})

    async def tokenize(self, call: HttpCall) -> Response:
        def read(body: TokenizeBody, _: bytes) -> tuple[TokenizeInput, bool]:
            given = body.to_input(
                known_variables=lambda has_tools: tokenizer.template_variables(has_tools=has_tools),
                note_ignored=call.ignored.note,
            )
            return given, body.return_token_strs

        tokenizer = self._servicer.tokenizer
        given, has_strings = await call.body(TokenizeBody, read)
        with call.metrics.counting_rejections("http"):
            given = replace(given, tenant=call.tenant.name)
            try:
                token_ids = await self._servicer.tokenize(given)
            except InvalidRequestError as error:
                raise renamed(error, {"text": "prompt"}) from error
            strings = None
            if has_strings:
                strings = await self._servicer.token_strings(token_ids, tenant=call.tenant.name)
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": self._servicer.config.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, call: HttpCall) -> Response:
        def read(body: DetokenizeBody, _: bytes) -> tuple[tuple[int, ...], str | None]:
            return body.token_ids(), body.model

        token_ids, model = await call.body(DetokenizeBody, read)
        with call.metrics.counting_rejections("http"):
            text = await self._servicer.detokenize(
                token_ids,
                tenant=call.tenant.name,
                skip_special_tokens=False,
                model=model,
                param="tokens",
            )
        return json_response({"prompt": text})

    async def openapi(self, call: HttpCall) -> Response:
        return json_response(self._document)

    async def docs(self, call: HttpCall) -> Response:
        return Response(self._page, media_type="text/html", headers=PAGE_HEADERS)


def _file(
    endpoint: Callable[[Request], Awaitable[Response]],
) -> Callable[[HttpCall], Awaitable[Response]]:
    async def respond(call: HttpCall) -> Response:
        return await endpoint(call.request)

    return respond

"""The endpoints of the server itself: health, metrics, tokenization, documentation, web page."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.routing import Route

from cluster.serving.admin.openapi import openapi_document
from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.http.endpoint import HEALTHY, Access, Endpoint, json_response
from cluster.serving.json_body import renamed
from pagedray.errors import EngineError, InvalidRequestError
from pagedray.version import __version__

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.inputs import TokenizeInput
    from cluster.serving.servicer import Servicer

__all__ = ["PAGE_PATHS", "server_endpoints"]

_FOLDER = resources.files("cluster.serving.admin") / "web"
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "worker-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types pagedray-worker",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # The browser revalidates each time, by the entity tag.
    "cache-control": "no-cache",
}

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2128; background: #fff; }
h2 { margin-top: 2.5rem; } h3 { margin: 0; font-size: 1rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { background: #f4f5f7; padding: 1rem; overflow: auto; border-radius: 6px; }
details { border: 1px solid #d8dce2; border-radius: 6px; margin: .5rem 0; padding: .5rem 1rem; }
summary { cursor: pointer; } table { border-collapse: collapse; width: 100%; margin: .5rem 0; }
td { border-top: 1px solid #e4e7eb; padding: .3rem .6rem .3rem 0; vertical-align: top; }
.method { display: inline-block; width: 4.8rem; font-weight: 700; }
:not(pre) > code { background: #f4f5f7; padding: .1em .3em; border-radius: 4px;
  overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { color: #e3e6ea; background: #14171b; }
  pre, :not(pre) > code { background: #1d2126; } details, td { border-color: #343a42; }
  a { color: #7fb2ff; } }
"""
_Document = dict[str, Any]  # Any: JSON


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
        self._page = openapi_page()

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


def _files_below(folder: Traversable, path: str) -> dict[str, Traversable]:
    """Return the files in a folder and its folders, by path."""
    found = {}
    for entry in folder.iterdir():
        if entry.is_dir():
            found.update(_files_below(entry, f"{path}{entry.name}/"))
        else:
            found[path + entry.name] = entry
    return found


_FILES = {
    "/": _FOLDER / "index.html",
    "/icon.svg": _FOLDER / "icon.svg",
    **_files_below(_FOLDER / "page", "/page/"),
}

PAGE_PATHS = frozenset(_FILES)
"""The paths that require no key."""


def page_routes() -> list[Route]:
    """Return the routes of the page's files."""
    return [
        _route(path, file.read_bytes(), _MEDIA_TYPES[f".{file.name.rpartition('.')[2]}"])
        for path, file in _FILES.items()
    ]


def _route(path: str, content: bytes, media_type: str) -> Route:
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**_HEADERS, "etag": tag}

    async def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return Route(path, respond, methods=["GET"])


@cache
def openapi_page() -> bytes:
    """Return the HTML page of the OpenAPI document."""
    document: _Document = openapi_document()
    operations = [
        (path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    tags = dict.fromkeys(operation["tags"][0] for _, _, operation in operations)
    parts = [
        f"<section><h2>{escape(tag)}</h2>"
        + "".join(
            _operation(path, method, operation)
            for path, method, operation in operations
            if operation["tags"][0] == tag
        )
        + "</section>"
        for tag in tags
    ]
    info = document["info"]
    schemas = "".join(_schema(name, one) for name, one in document["components"]["schemas"].items())
    title = f"{escape(info['title'])} {escape(info['version'])}"
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        f"<p>{_text(info['description'])}</p>"
        '<p><a href="./">Chat</a> | <a href="openapi.json">openapi.json</a></p>'
        f"{''.join(parts)}<section><h2>Schemas</h2>{schemas}</section></body></html>"
    )
    return page.encode()


def _operation(path: str, method: str, operation: _Document) -> str:
    body = operation.get("requestBody")
    rows = [
        f"<tr><td><code>{escape(status)}</code></td><td>{_text(response['description'])}</td>"
        f"<td>{_contents(response.get('content', {}))}</td></tr>"
        for status, response in operation["responses"].items()
    ]
    parameters = "".join(
        f"<p>{escape(one['in'].capitalize())} <code>{escape(one['name'])}</code>: "
        f"{_text(one['description'])}</p>"
        for one in operation.get("parameters", ())
        if "description" in one
    )
    request = "" if body is None else f"<p>Request body: {_contents(body['content'])}</p>"
    return (
        f'<details><summary><span class="method">{escape(method.upper())}</span> '
        f"<code>{escape(path)}</code> {_text(operation['summary'])}</summary>"
        f"{parameters}{request}<table>{''.join(rows)}</table></details>"
    )


def _text(text: str) -> str:
    """Return a text as HTML; its code stands between backticks."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def _contents(content: _Document) -> str:
    return ", ".join(
        _link(one["schema"]["$ref"].rpartition("/")[2])
        if "$ref" in one["schema"]
        else f"<code>{escape(media_type)}</code>"
        for media_type, one in content.items()
    )


def _link(name: str) -> str:
    return f'<a href="#{escape(name)}"><code>{escape(name)}</code></a>'


def _schema(name: str, schema: _Document) -> str:
    text = json.dumps(schema, indent=2, ensure_ascii=False)
    return (
        f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> '
        f"{_text(schema.get('description', ''))}</summary><pre>{escape(text)}</pre></details>"
    )

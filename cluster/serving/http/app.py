"""The HTTP application: it routes, authorizes and answers every request.

A request without a key gets 401 for every path, known or not, unless the endpoint's entry makes it
public. Paths are looked up exactly as received, never in a URL built from headers.
"""

from __future__ import annotations

import logging
import math
import secrets
from http import HTTPStatus
from typing import TYPE_CHECKING

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cluster.serving.auth import ANONYMOUS, Tenant
from cluster.serving.continuation import CONTINUATION_KEY
from cluster.serving.http.endpoint import (
    OPENAI_ERRORS,
    Access,
    Endpoint,
    error_body,
    json_response,
    rejection_body,
)
from cluster.serving.http.http_call import HttpCall
from cluster.serving.http.kept_response import kept_if_large
from cluster.serving.http.request_checks import AllowedOrigins, check_head
from cluster.serving.inputs import MAX_CLIENT_ID_LENGTH, Arrival
from pagedray.errors import (
    AuthenticationError,
    EngineError,
    ForbiddenError,
    InternalError,
    OverloadedError,
    PagedRayError,
)
from pagedray.text import nearest_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.datastructures import Headers
    from starlette.types import Receive, Scope, Send

    from cluster.serving.http.endpoint import ErrorFormat, Json
    from cluster.serving.http.request_checks import AllowedHosts
    from cluster.serving.inputs import Operation
    from cluster.serving.open_calls import OpenCall
    from cluster.serving.servicer import Servicer

__all__ = ["ABSENT", "HttpApp"]

logger = logging.getLogger(__name__)

_CLIENT_ERROR = "invalid_request_error"
# The client has disconnected and receives nothing.
_DISCONNECTED_STATUS = 400

_LONGEST_LIKE = 64
"""Characters of a path that is compared with all others, which takes time."""
_VERSION = "/v1"
ABSENT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("/invocations",),
        "use the endpoint for the body; a router in front can choose it by the fields of the body",
    ),
    (
        ("/sleep", "/wake_up", "/is_sleeping"),
        "weights stay on the device; stop the server, or let Ray Serve scale it to zero",
    ),
    (
        ("/generate", "/generate_stream", "/inference/v1/generate"),
        "use `/v1/completions`, which also accepts token ids and returns log-probabilities",
    ),
    (
        ("/get_model_info", "/get_server_info", "/health_generate", "/model_info"),
        "use `/v1/models`, `/server_info` and `/health`",
    ),
    (
        ("/reset_prefix_cache", "/flush_cache"),
        "`cache_salt` prevents calls from sharing prefixes; cached blocks are evicted when others "
        "need them",
    ),
    (
        ("/reset_mm_cache", "/reset_encoder_cache"),
        "the server only reads text, of which it caches no other input",
    ),
    (("/classify",), "use `/score` and `/rerank`; named classes are not supported"),
    (
        ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        "LoRA adapters are not supported; merge the adapter into the weights",
    ),
    (
        ("/update_weights", "/pause", "/resume", "/is_paused"),
        "the weights do not change while the server runs; start another server",
    ),
    (
        ("/scale_elastic_ep", "/is_scaling_elastic_ep"),
        "the number of ranks is fixed; Ray Serve adds and removes replicas",
    ),
    (("/collective_rpc",), "code of clients is never run"),
    (
        ("/start_profile", "/stop_profile"),
        "`/metrics` and the traces have the times of calls and steps",
    ),
    (("/tokenizer_info",), "use `/tokenize`, or the files of the model"),
    (
        ("/v1/chat/completions/render", "/v1/completions/render"),
        "use `/tokenize`, which renders a conversation, too",
    ),
    (
        ("/v1/responses/compact",),
        "send fewer items, or use `truncate_prompt_tokens` of `/v1/chat/completions`",
    ),
    (("/v1/moderations",), "the server has no moderation model"),
    (
        (
            *("/v1/audio/...", "/v1/images/...", "/v1/videos/...", "/v1/realtime/..."),
            *("/v1/files/...", "/v1/uploads/...", "/v1/batches/...", "/v1/messages/batches/..."),
            *("/v1/vector_stores/...", "/v1/fine_tuning/..."),
        ),
        "the server only reads and writes text, and does not store files; `pagedray "
        "run-batch` and `LLM.generate` run many prompts",
    ),
    (
        ("/v1/conversations/...", "/v1/assistants/...", "/v1/threads/..."),
        "conversations are not stored, except for responses; send all messages, or use "
        "`/v1/responses` with `previous_response_id`",
    ),
    (
        ("/v1/chat/completions/...",),
        "completions are not stored (`store` is ignored); `/v1/responses` are read by their ids",
    ),
    (
        ("/api/chat", "/api/generate", "/api/tags", "/api/embed"),
        "use `/v1/chat/completions`, `/v1/completions`, `/v1/models` and `/v1/embeddings`",
    ),
    (("/v1/complete",), "use `/v1/messages`"),
    (("/redoc",), "use `/docs`"),
)
"""Paths of other servers that do not exist here, each with an alternative or the reason.

A path that ends with dots stands for itself and for all paths below it. `docs/compatibility.md` is
made from this table.
"""
_ABSENT = {path: reason for paths, reason in ABSENT for path in paths}
_MOST_STEPS = 4
"""Parts of the longest path with dots; the first of them is empty."""


class HttpApp:
    """An ASGI application of some endpoints over one servicer."""

    def __init__(
        self,
        servicer: Servicer,
        endpoints: tuple[Endpoint, ...],
        *,
        read_timeout_s: float,
        allowed_hosts: AllowedHosts | None = None,
        allowed_origins: AllowedOrigins | None = None,
    ) -> None:
        """The head of a request, and then its body, must arrive within `read_timeout_s`.

        `allowed_hosts` are checked if no keys are required; None allows all. Web pages of other
        origins than `allowed_origins` cannot read responses.
        """
        self._origins = AllowedOrigins() if allowed_origins is None else allowed_origins
        self.endpoints = endpoints
        self.read_timeout_s = read_timeout_s
        self._servicer = servicer
        self._allowed_hosts = allowed_hosts
        self._table = EndpointTable(endpoints)

    @property
    def write_timeout_s(self) -> float:
        """How long a connection may take to accept sent data."""
        return self._servicer.reader_limits.write_timeout_s

    def note_freed(self, num_bytes: int) -> None:
        """Note that bytes of a head or a body that did not become a request are not kept."""
        self._servicer.intake.reception.note_freed(num_bytes)

    def count_stalled(self) -> None:
        """Count a client that did not read."""
        self._servicer.metrics.count_stalled_reader("http")

    def note_unreadable(self, status: HTTPStatus, error: str) -> None:
        """Count a request that was rejected before its path was known."""
        self._servicer.metrics.count_outcome("invalid", "http")
        # The connection logs requests that are not valid HTTP.
        if status is not HTTPStatus.BAD_REQUEST:
            self._servicer.rejected_calls.note(
                "http", status=status.value, method="", path="", param=None, error=error
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        request = Request(scope, receive)
        response = await self._respond(request)
        origin = request.headers.get("origin")
        if origin is not None and self._origins.allows(origin):
            response.headers.update(self._origins.headers_for(origin))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            return await self._dispatch(request)
        except PagedRayError as error:
            await self._servicer.delay_rejection(error)
            return self._rejection(request, error)
        except HTTPException as error:
            body = error_body(error.detail, _CLIENT_ERROR)
            return self._error(request, body, error.status_code, error.headers)
        except ClientDisconnect:
            return Response(status_code=_DISCONNECTED_STATUS)
        except Exception as error:
            logger.error("An HTTP request failed.", exc_info=error)
            return self._rejection(request, InternalError())

    def _rejection(
        self, request: Request, error: PagedRayError, headers: Mapping[str, str] | None = None
    ) -> Response:
        given = dict(headers or {})
        if isinstance(error, OverloadedError | EngineError):
            given["retry-after"] = str(math.ceil(error.retry_after_s))
        if isinstance(error, AuthenticationError):
            given["www-authenticate"] = "Bearer"
        return self._error(request, rejection_body(error), error.http_status, given)

    def _error(
        self, request: Request, body: Json, status: int, headers: Mapping[str, str] | None
    ) -> Response:
        """Return an error, given in the format of OpenAI, as a response of the path's API."""
        path = _path_of(request.scope)
        self._log_rejection(request.method, path, body["error"], status)
        form = self._table.errors_of(path)
        request_id = _id_of(request)
        given = dict(headers or {})
        if form.id_header is not None:
            given[form.id_header] = request_id
        return json_response(form.write(body, status, request_id), status=status, headers=given)

    def _log_rejection(self, method: str, path: str, error: object, status: int) -> None:
        endpoint = self._table.find(path)[0].get(method)
        if endpoint is not None and endpoint.is_health_check:
            # A health check fails every few seconds while the server starts.
            return
        assert isinstance(error, dict)
        self._servicer.rejected_calls.note(
            "http",
            status=status,
            method=method,
            path=path,
            param=error["param"],
            error=error["message"],
        )

    async def _dispatch(self, request: Request) -> Response:
        try:
            check_head(request.scope)
        except HTTPException:
            self._servicer.metrics.count_outcome("invalid", "http")
            raise
        try:
            self._check_host(request.headers)
        except HTTPException:
            self._servicer.metrics.count_outcome("forbidden", "http")
            raise
        methods, path_value = self._table.find(_path_of(request.scope))
        endpoint = methods.get(request.method)
        if endpoint is None and methods and request.method == "OPTIONS":
            # A browser sends no key with it.
            preflight = self._origins.preflight(request.headers, methods)
            if preflight is not None:
                return preflight
        tenant = self._authorize(request, endpoint)
        if not methods:
            raise HTTPException(404, self._not_found(_path_of(request.scope)))
        if endpoint is None:
            allowed = {"allow": ", ".join(sorted(methods))}
            raise HTTPException(405, f"Method not allowed; use {allowed['allow']}.", allowed)
        if endpoint.operation is None and not endpoint.is_counted:
            return await self._handle(endpoint, self._call(request, tenant, path_value, None))
        continuation = request.scope.get(CONTINUATION_KEY)
        try:
            entered = self._servicer.enter_call(
                tenant,
                uses_engine=endpoint.operation is not None,
                is_continued=continuation is not None and bool(continuation.sequences),
            )
        except OverloadedError as error:
            call = self._call(request, tenant, path_value, None)
            self._servicer.note_rejected(error, _arrival(call, endpoint.operation), "http")
            raise
        try:
            return await self._handle(endpoint, self._call(request, tenant, path_value, entered))
        finally:
            entered.leave()

    def _not_found(self, path: str) -> str:
        """Return the message for a path that does not exist."""
        absent = self._table.absent(path)
        if absent is not None:
            return f"Not found: {absent}"
        near = self._table.near(path)
        return f"Not found: no such endpoint{'.' if near is None else f'; did you mean {near}?'}"

    async def _handle(self, endpoint: Endpoint, call: HttpCall) -> Response:
        response = await endpoint.handler(call)
        return kept_if_large(response, self._servicer.buffers, call.tenant.name)

    def _call(
        self, request: Request, tenant: Tenant, path_value: str, entered: OpenCall | None
    ) -> HttpCall:
        return HttpCall(
            request=request,
            tenant=tenant,
            path_value=path_value,
            metrics=self._servicer.metrics,
            ignored=self._servicer.ignored,
            intake=self._servicer.intake,
            read_timeout_s=self.read_timeout_s,
            entered=entered,
        )

    def _check_host(self, headers: Headers) -> None:
        """Raise HTTPException for a request that another site's page may have caused."""
        # A page does not know the visitor's key.
        if self._allowed_hosts is not None and not self._servicer.authenticator.requires_keys:
            self._allowed_hosts.check(headers)

    def _authorize(self, request: Request, endpoint: Endpoint | None) -> Tenant:
        """Return the tenant of a request. Raises AuthenticationError or ForbiddenError."""
        if endpoint is not None and endpoint.access is Access.PUBLIC:
            return ANONYMOUS
        with self._servicer.metrics.counting_rejections("http"):
            tenant = self._servicer.authenticate(_credential(request))
            if endpoint is not None and endpoint.access is Access.ADMINS and not tenant.is_admin:
                raise ForbiddenError("This endpoint requires the API key of an admin.")
        return tenant


def _credential(request: Request) -> str | None:
    """Return the Authorization header, or the key header of Anthropic's clients.

    Raises AuthenticationError.
    """
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise AuthenticationError("The request has more than one Authorization header.")
    if given:
        return given[0]
    key = request.headers.get("x-api-key")
    return None if key is None else f"Bearer {key}"


def _id_of(request: Request) -> str:
    """Return the client's own id of a request, or a new id."""
    given = request.headers.get("x-request-id", "")
    is_valid = 0 < len(given) <= MAX_CLIENT_ID_LENGTH and given.isprintable()
    return given if is_valid else secrets.token_hex(16)


def _arrival(call: HttpCall, operation: Operation | None) -> Arrival | None:
    if operation is None:
        return None
    return Arrival(
        operation=operation, tenant=call.tenant.name, client_id=call.client_id, origin=call.origin
    )


def _path_of(scope: Scope) -> str:
    # The server that mounts the application sets its root path.
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path.removeprefix(root) or "/" if root else path


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


class EndpointTable:
    """Finds endpoints by the exact path of a request, without normalization.

    HEAD is answered where GET is, unless the path has a parameter: a stream would be resumed.
    """

    def __init__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._exact: dict[str, dict[str, Endpoint]] = {}
        self._open: dict[tuple[str, str], dict[str, Endpoint]] = {}
        """Parameterized endpoints, keyed by (prefix, suffix)."""
        for endpoint in endpoints:
            prefix, brace, rest = endpoint.path.partition("{")
            if brace:
                ends = prefix, rest.partition("}")[2]
                self._open.setdefault(ends, {})[endpoint.method] = endpoint
            else:
                methods = self._exact.setdefault(prefix, {})
                methods[endpoint.method] = endpoint
                if endpoint.method == "GET":
                    # The server leaves the body out.
                    methods["HEAD"] = endpoint
        self._errors_below = {
            f"{one.path}/": one.errors for one in endpoints if one.errors is not OPENAI_ERRORS
        }
        # A path with an end is more specific than a path that ends with its parameter.
        self._open = dict(sorted(self._open.items(), key=lambda one: -len(one[0][1])))

    def find(self, path: str) -> tuple[Mapping[str, Endpoint], str]:
        """Return the endpoints of a path by method, and the value of its parameter."""
        found = self._exact.get(path)
        if found is not None:
            return found, ""
        if path in _ABSENT:
            # Although the parameter of another path matches it.
            return {}, ""
        for (prefix, suffix), by_method in self._open.items():
            is_longer = len(path) > len(prefix) + len(suffix)
            if is_longer and path.startswith(prefix) and path.endswith(suffix):
                return by_method, path[len(prefix) : len(path) - len(suffix)]
        return {}, ""

    def errors_of(self, path: str) -> ErrorFormat:
        """Return the format of errors of the API that a path belongs to."""
        methods, _ = self.find(path)
        of_path = (one.errors for one in methods.values())
        below = (form for root, form in self._errors_below.items() if path.startswith(root))
        return next(of_path, None) or next(below, OPENAI_ERRORS)

    def absent(self, path: str) -> str | None:
        """Return why a path of another server does not exist here; None for any other path."""
        whole = path.rstrip("/")
        if whole in self._exact:
            return None
        steps = whole.split("/", _MOST_STEPS)[:_MOST_STEPS]
        above = ("/".join(steps[:number]) for number in range(len(steps), 1, -1))
        for one in (whole, *(f"{each}/..." for each in above)):
            if one in _ABSENT:
                known = one.removesuffix("/...")
                return f"{known} is not available: {_ABSENT[one].replace('`', '')}."
        return None

    def near(self, path: str) -> str | None:
        """Return the path of an endpoint that a client most likely means; None is none.

        The URL that a client is given may lack the version, or have it twice, or be misspelled.
        """
        bare = path.removeprefix(_VERSION).rstrip("/")
        for one in (_VERSION + bare, bare):
            if one in self._exact:
                return one
        return nearest_name(path, self._exact) if len(path) <= _LONGEST_LIKE else None

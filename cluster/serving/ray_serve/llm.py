"""PagedRay inside `ray.serve.llm`: `LLMConfig(server_cls="pagedray:PagedRayLLM")`.

`engine_kwargs` of the configuration are the arguments of our own application, or vLLM's names of
engine options; `model_source` is the model, and `model_id` its name for clients. Requests pass
through the same HTTP application as everywhere else, so this module knows none of their fields. The
library is optional.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cluster.engine.vllm_options import own_options
from cluster.serving.http_app import build_http_app
from cluster.serving.ray_serve.deployment import deployment_options
from cluster.serving.ray_serve.options import (
    MESSAGES_PER_S,
    MessagePace,
    ServeOptions,
    read_arguments,
)
from cluster.serving.ray_serve.replica_engine import ServedReplica

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.types import ASGIApp, Message, Scope

    from cluster.serving.ray_serve.options import ServeArguments

__all__ = ["LLMAnswers", "PagedRayLLM", "llm_arguments", "post"]

_MODELS = "ray.serve.llm.openai_api_models"
_HEADERS = ("authorization", "traceparent", "tracestate", "x-request-id")
"""Headers that our application reads, besides headers of the body."""
_SERVE_NAMES = frozenset(field.name for field in fields(ServeOptions))


class PagedRayLLM(ServedReplica):
    """The LLM server class that the library's ingress calls."""

    # Any: the configuration and the requests are the library's, which need not be installed.
    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self._llm_config = llm_config
        await super().__init__(llm_arguments(llm_config))
        self._answers = LLMAnswers(
            build_http_app(self._replica.servicer), MessagePace(MESSAGES_PER_S)
        )

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:  # Any: see above.
        """Return the options of the deployment, without its name, which the library chooses."""
        options = deployment_options(llm_arguments(llm_config))
        return {name: value for name, value in options.items() if name != "name"}

    async def chat(
        self,
        request: Any,  # Any: see above.
        raw_request_info: Any = None,  # Any: see above.
    ) -> AsyncGenerator[Any]:
        """Yield server-sent events, or one response."""
        async with self._leased(self._answers.chat(request, raw_request_info)) as answers:
            async for answer in answers:
                yield answer

    async def completions(
        self,
        request: Any,  # Any: see above.
        raw_request_info: Any = None,  # Any: see above.
    ) -> AsyncGenerator[Any]:
        """Yield server-sent events, or one response."""
        async with self._leased(self._answers.completions(request, raw_request_info)) as answers:
            async for answer in answers:
                yield answer

    async def llm_config(self) -> Any:  # Any: see above.
        """Return the configuration."""
        return self._llm_config


class LLMAnswers:
    """Responses of the HTTP application, as the library's ingress takes them."""

    def __init__(self, app: ASGIApp, pace: MessagePace) -> None:
        self._app = app
        self._pace = pace

    # Any: the library's own, as above.
    def chat(self, request: Any, raw_request_info: Any) -> AsyncGenerator[Any]:
        """Return the events of a chat completion, or one response."""
        return self._to("/v1/chat/completions", request, raw_request_info, "ChatCompletion")

    # Any: the library's own, as above.
    def completions(self, request: Any, raw_request_info: Any) -> AsyncGenerator[Any]:
        """Return the events of a text completion, or one response."""
        return self._to("/v1/completions", request, raw_request_info, "Completion")

    async def _to(
        self,
        path: str,
        request: Any,  # Any: the library's own.
        raw_request_info: Any,  # Any: the library's own.
        kind: str,
    ) -> AsyncGenerator[Any]:
        status = 0
        whole: list[bytes] = []
        # Fields such as the schema of a response format have other names in Python.
        body = request.model_dump_json(by_alias=True, exclude_unset=True).encode()
        headers = {} if raw_request_info is None else raw_request_info.headers
        parts = post(self._app, path, body, headers)
        async with aclosing(parts):
            with self._pace.stream() as stream:
                async for status, part in parts:
                    if status == 200 and request.stream:
                        yield part.decode()
                        await stream.pause()
                    else:
                        whole.append(part)
        if not whole:
            return
        answer = json.loads(b"".join(whole))
        models = import_module(_MODELS)
        if status == 200:
            yield getattr(models, f"{kind}Response")(**answer)
        else:
            yield models.ErrorResponse(error={**answer["error"], "code": status})


async def post(
    app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield the status and each part of an application's response to a JSON body.

    The application is resumed when the caller requests the next part.
    """
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []
    is_sent, is_taken, is_left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await is_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if is_left.is_set():
            # Let the application receive the disconnect.
            await asyncio.sleep(0)
            return
        sent.append(message)
        is_sent.set()
        is_taken.clear()
        await is_taken.wait()

    running = asyncio.ensure_future(app(_scope(path, body, headers), receive, send))
    running.add_done_callback(lambda _: is_sent.set())
    status = 0
    try:
        while True:
            await is_sent.wait()
            is_sent.clear()
            if not sent:
                break
            message = sent.pop()
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message.get("body"):
                yield status, message["body"]
            is_taken.set()
        await running
    finally:
        is_left.set()
        is_taken.set()
        await asyncio.wait((running,))


def _scope(path: str, body: bytes, headers: Mapping[str, str]) -> Scope:
    given = {name.lower(): text for name, text in headers.items()}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            *(
                (name.encode(), given[name].encode("latin-1", "replace"))
                for name in _HEADERS
                if name in given
            ),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }


def llm_arguments(llm_config: Any) -> ServeArguments:  # Any: the library's own.
    """Return our arguments for a configuration of the library. Raises StartupError."""
    loading = llm_config.model_loading_config
    given = llm_config.engine_kwargs
    own = {name: value for name, value in given.items() if name in _SERVE_NAMES}
    engine = own_options({name: value for name, value in given.items() if name not in own})
    return read_arguments(
        {
            "model": loading.model_source or loading.model_id,
            "served_model_name": loading.model_id,
            **engine,
            **own,
        }
    )

"""PagedRay inside `ray.serve.llm`: `LLMConfig(server_cls="cluster.serving.serve_llm:PagedRayLLM")`.

`engine_kwargs` of the configuration are the arguments of our own application, `model_source` is the
folder of the checkpoint. Requests go through the same HTTP application as everywhere else, so that
this module knows none of their fields. The library is an extra: nothing else needs it.
"""

from __future__ import annotations

import asyncio
import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cluster.serving.deployment import deployment_options
from cluster.serving.http_app import build_app
from cluster.serving.replica import Replica, executor_in
from cluster.serving.serve_leases import Leases
from cluster.serving.serve_options import read_arguments
from cluster.serving.serve_replicas import current_call_id

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from starlette.types import ASGIApp, Message, Scope

    from cluster.serving.serve_options import ServeArguments

__all__ = ["PagedRayLLM", "post"]

_READ_TIMEOUT_S = 30.0
_MODELS = "ray.serve.llm.openai_api_models"


class PagedRayLLM:
    """The server of one model, as the library's ingress calls it."""

    # Any: the configuration and the requests are the library's, which need not be installed.
    async def __init__(self, llm_config: Any) -> None:  # type: ignore[misc]  # Serve awaits it
        self.llm_config = llm_config
        arguments = _arguments(llm_config)
        self._leases = Leases(arguments.serve.lease_s)
        self._replica = await Replica.started(arguments, executor_in)
        self._app = build_app(self._replica.servicer, read_timeout_s=_READ_TIMEOUT_S)

    @classmethod
    def get_deployment_options(cls, llm_config: Any) -> dict[str, Any]:  # Any: see above.
        """Return how a replica is placed; the library names it for its model."""
        options = deployment_options(_arguments(llm_config))
        return {name: value for name, value in options.items() if name != "name"}

    async def chat(
        self,
        request: Any,  # Any: see above.
        raw_request_info: object = None,
    ) -> AsyncGenerator[Any]:
        """Yield server-sent events, or one answer."""
        async for answer in self._answers("/v1/chat/completions", request, "ChatCompletion"):
            yield answer

    async def completions(
        self,
        request: Any,  # Any: see above.
        raw_request_info: object = None,
    ) -> AsyncGenerator[Any]:
        """Yield server-sent events, or one answer."""
        async for answer in self._answers("/v1/completions", request, "Completion"):
            yield answer

    def check_health(self) -> None:
        """Raise EngineError unless the engine makes progress or has none to make."""
        self._replica.check()

    async def renew(self, call_ids: Sequence[str]) -> None:
        """Let calls of this replica run on, by the ids that Serve gave them."""
        self._leases.renew(frozenset(call_ids))

    async def __del__(self) -> None:
        """End the engine."""
        if hasattr(self, "_replica"):
            await self._replica.stop()

    async def _answers(
        self,
        path: str,
        request: Any,  # Any: see above.
        kind: str,
    ) -> AsyncGenerator[Any]:
        status = 0
        whole: list[bytes] = []
        body = request.model_dump_json(exclude_unset=True).encode()
        with self._leases.held(current_call_id()):
            async for status, part in post(self._app, path, body):
                if status == 200 and request.stream:
                    yield part.decode()
                else:
                    whole.append(part)
        if not whole:
            return
        answer = json.loads(b"".join(whole))
        models = import_module(_MODELS)
        if status == 200:
            yield getattr(models, f"{kind}Response")(**answer)
        else:
            error = {**answer["error"], "code": status}
            yield models.ErrorResponse(error=models.ErrorInfo(**error))


async def post(app: ASGIApp, path: str, body: bytes) -> AsyncGenerator[tuple[int, bytes]]:
    """Yield the status and each part of what an application answers to JSON."""
    parts: asyncio.Queue[Message] = asyncio.Queue()
    incoming: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    is_left = asyncio.Event()

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await is_left.wait()
        return {"type": "http.disconnect"}

    scope: Scope = {
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
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
    }
    running = asyncio.ensure_future(app(scope, receive, parts.put))
    running.add_done_callback(lambda _: parts.put_nowait({"type": "end"}))
    status = 0
    try:
        while (message := await parts.get())["type"] != "end":
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message.get("body"):
                yield status, message["body"]
        await running
    finally:
        is_left.set()
        await asyncio.wait((running,))


def _arguments(llm_config: Any) -> ServeArguments:  # Any: see above.
    model = llm_config.model_loading_config.model_source
    return read_arguments({"model": model, **llm_config.engine_kwargs})

"""The endpoints that score texts, as clients of Jina, Cohere and vLLM call them."""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
from starlette.responses import Response

from cluster.serving.http.endpoint import Endpoint
from cluster.serving.http.http_call import JSON_TYPE
from cluster.serving.openai.bodies.score_body import RerankBody, ScoreBody
from cluster.serving.openai.event_stream import unless_disconnected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.http.errors import Json
    from cluster.serving.http.http_call import HttpCall
    from cluster.serving.inputs import ScoreInput
    from cluster.serving.servicer import EmbeddingOutput, Servicer

__all__ = ["score_endpoints"]

_encode = msgspec.json.Encoder().encode


def score_endpoints(servicer: Servicer) -> tuple[Endpoint, ...]:
    """Return the endpoints, each under the names that it has elsewhere."""
    handlers = _ScoreHandlers(servicer)
    return tuple(
        Endpoint(method="POST", path=path, handler=handler, operation="score")
        for handler, paths in (
            (handlers.rerank, ("/rerank", "/v1/rerank", "/v2/rerank")),
            (handlers.score, ("/score", "/v1/score")),
        )
        for path in paths
    )


class _ScoreHandlers:
    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._model = servicer.config.model.name

    async def rerank(self, call: HttpCall) -> Response:
        def read(body: RerankBody, _: bytes) -> tuple[ScoreInput, int | None, bool]:
            given = body.to_input()
            return given, body.top_n or None, body.return_documents

        given, top_n, has_documents = await call.body(RerankBody, read)
        output = await self._scored(call, given)
        scores: list[float] = output.vectors[:, 0].tolist()
        # The first of equals stays first.
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        results: list[Json] = []
        for index in order:
            result: Json = {"index": index, "relevance_score": scores[index]}
            if has_documents:
                result["document"] = {"text": given.pairs[index][1]}
            results.append(result)
        return _response(
            {
                "id": f"rerank-{uuid.uuid4().hex}",
                "model": self._model,
                "usage": {"total_tokens": output.num_prompt_tokens},
            },
            "results",
            results,
        )

    async def score(self, call: HttpCall) -> Response:
        def read(body: ScoreBody, _: bytes) -> ScoreInput:
            return body.to_input()

        output = await self._scored(call, await call.body(ScoreBody, read))
        return _response(
            {
                "id": f"score-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": self._model,
                "usage": {
                    "prompt_tokens": output.num_prompt_tokens,
                    "total_tokens": output.num_prompt_tokens,
                },
            },
            "data",
            [
                {"index": index, "object": "score", "score": score}
                for index, score in enumerate(output.vectors[:, 0].tolist())
            ],
        )

    async def _scored(self, call: HttpCall, given: ScoreInput) -> EmbeddingOutput:
        given = replace(given, tenant=call.tenant.name, origin=call.origin)
        work = self._servicer.score(given, call.entered)
        return await unless_disconnected(call.request.receive, work)


def _response(head: Json, name: str, entries: Sequence[Json]) -> Response:
    """Return a response with entries in its field `name`."""
    return Response(_encode({**head, name: entries}), media_type=JSON_TYPE)

"""The HTTP application of a replica: all endpoints, over one servicer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cluster.serving.admin.endpoints import server_endpoints
from cluster.serving.anthropic.endpoints import anthropic_endpoints
from cluster.serving.http.app import HttpApp
from cluster.serving.openai.endpoints import openai_endpoints, score_endpoints
from cluster.serving.responses.endpoints import responses_endpoints
from cluster.serving.responses.stored_responses import ResponseStore, StoredResponses, StoreLimits

if TYPE_CHECKING:
    from cluster.serving.http.request_checks import AllowedHosts, AllowedOrigins
    from cluster.serving.servicer import Servicer

__all__ = ["build_http_app"]


def build_http_app(
    servicer: Servicer,
    *,
    read_timeout_s: float | None = None,
    allowed_hosts: AllowedHosts | None = None,
    allowed_origins: AllowedOrigins | None = None,
    store: ResponseStore | None = None,
) -> HttpApp:
    """Return the ASGI application.

    A body must arrive within `read_timeout_s`; None takes the time of the servicer's intake.
    `allowed_hosts` are checked if no keys are required; None allows all. Web pages of
    `allowed_origins` may use the server; None allows no others than its own. Responses are kept in
    `store`; None keeps none.
    """
    if store is None:
        store = ResponseStore(StoredResponses(StoreLimits(num_responses=0)))
    endpoints = (
        *openai_endpoints(servicer),
        *score_endpoints(servicer),
        *anthropic_endpoints(servicer),
        *responses_endpoints(servicer, store),
        *server_endpoints(servicer),
    )
    if read_timeout_s is None:
        read_timeout_s = servicer.intake.read_timeout_s
    return HttpApp(
        servicer,
        endpoints,
        read_timeout_s=read_timeout_s,
        allowed_hosts=allowed_hosts,
        allowed_origins=allowed_origins,
    )

"""The OpenAPI document is true: whoever is driven by it finds no server error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import OpenAPIV31SpecValidator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from cluster.serving.http_app import build_app
from cluster.serving.openapi import openapi_document
from cluster.serving.web_page import PAGE_PATHS

if TYPE_CHECKING:
    import httpx
    import pytest

    from tests.serving.conftest import Server

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def test_document_is_valid_openapi_3_1() -> None:
    assert list(OpenAPIV31SpecValidator(openapi_document()).iter_errors()) == []


def test_document_has_every_endpoint_and_no_other(server: Server) -> None:
    app = build_app(server.fronts.servicer, read_timeout_s=1.0)
    found = {
        (endpoint.method.lower(), endpoint.path)
        for endpoint in app.endpoints
        if endpoint.path not in PAGE_PATHS
    }
    paths = openapi_document()["paths"]
    assert isinstance(paths, dict)
    assert {(method, path) for path, methods in paths.items() for method in methods} == found


def test_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text
    assert "http" not in page.text.replace("httptools", "").partition("<section><h2>Schemas")[0]
    assert "/v1/chat/completions" in page.text
    document = http.get("/openapi.json").json()
    assert document == json.loads(json.dumps(openapi_document()))


def test_generated_requests_find_no_server_error(server: Server, subtests: pytest.Subtests) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in schema.get_all_operations():
        operation = result.ok()  # type: ignore[union-attr]  # it is there
        num_examples = 20 if operation.method == "post" else 5

        @given(case=operation.as_strategy())
        @settings(
            max_examples=num_examples,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        def call(case: schemathesis.Case) -> None:  # type: ignore[type-arg]  # the library leaves it open
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                # Another one is refused before anything else is looked at.
                case.body["model"] = "tiny"
            answer = case.call(base_url=server.url, timeout=20)
            case.validate_response(answer, checks=CHECKS)

        with subtests.test(operation.label):
            call()

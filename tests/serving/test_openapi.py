"""The OpenAPI document is valid, and requests generated from it cause no server error."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from cluster.serving.admin.endpoints import PAGE_PATHS
from cluster.serving.admin.openapi import openapi_document
from cluster.serving.http_app import build_http_app
from cluster.serving.intake import ReaderLimits
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def running_server(tokenizer: Tokenizer) -> Iterator[Server]:
    """A server on which every operation is supported."""
    limits = ReaderLimits(resume_grace_s=5.0, resumes_anonymous=True)
    with Server(tokenizer, reader_limits=limits) as server:
        yield server


def test_document_is_valid_openapi_3_1() -> None:
    assert list(OpenAPIV31SpecValidator(openapi_document()).iter_errors()) == []


def test_every_parameter_has_a_description() -> None:
    document: Any = openapi_document()  # Any: JSON
    schemas = document["components"]["schemas"]
    for name in (name for name in schemas if name.endswith("Body")):
        for parameter, schema in schemas[name]["properties"].items():
            assert schema.get("description"), f"{name}.{parameter}"


def test_document_has_every_endpoint_and_no_other(server: Server) -> None:
    app = build_http_app(server.frontends.servicer, read_timeout_s=60.0)
    found = {
        (endpoint.method.lower(), endpoint.path)
        for endpoint in app.endpoints
        if endpoint.path not in PAGE_PATHS
    }
    paths = openapi_document()["paths"]
    assert isinstance(paths, dict)
    assert {(method, path) for path, methods in paths.items() for method in methods} == found


@pytest.mark.parametrize(
    ("headers", "status"),
    [({"host": "site.example"}, 421), ({"origin": "https://site.example"}, 403)],
)
def test_answers_to_pages_of_other_sites_are_documented(
    http: httpx.Client, headers: dict[str, str], status: int
) -> None:
    paths = openapi_document()["paths"]
    assert isinstance(paths, dict)
    for path, methods in paths.items():
        for method, operation in methods.items():
            response = http.request(method, path, headers=headers)
            assert response.status_code == status, path
            assert str(status) in operation["responses"], path


def test_page_loads_no_external_resources(http: httpx.Client) -> None:
    page = http.get("/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in page.text
    assert "http" not in page.text.replace("httptools", "").partition("<h2>Schemas")[0]
    assert "/v1/chat/completions" in page.text
    assert "header <code>Authorization: Bearer KEY</code>" in page.text
    assert "`" not in re.sub("<pre>.*?</pre>", "", page.text, flags=re.DOTALL)
    assert '<a href="./">' in page.text
    document = http.get("/openapi.json").json()
    assert document == json.loads(json.dumps(openapi_document()))


def test_generated_requests_find_no_server_error(server: Server) -> None:
    # The library of these requests takes most of a second to import.
    from tests.load.generated_requests import ask_all

    found = ask_all(server.url, 30, model="tiny")
    assert found["faults"] == []
    statuses = found["statuses"]
    assert isinstance(statuses, dict)
    # Some are valid, and some are not.
    assert {"POST /v1/completions 200", "POST /v1/completions 400"} <= statuses.keys()

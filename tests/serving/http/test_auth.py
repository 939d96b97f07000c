"""Authentication over HTTP, by the exact path of a request."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from cluster.serving.admin.web_page import PAGE_PATHS
from cluster.serving.auth.key_file import digest_of, new_key
from cluster.serving.http.endpoint import Access
from cluster.serving.http_app import build_http_app
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer

ALICE, BOB, ADMIN = new_key(), new_key(), new_key()
SPECIFIC = "/v1/models"
OPEN = {"/health", "/ping", "/ready", *PAGE_PATHS}


@pytest.fixture(scope="module")
def locked(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that requires keys."""
    path: Path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f'[tenants.alice]\nkeys = ["sha256:{digest_of(ALICE).hex()}"]\n'
        f'[tenants.bob]\nkeys = ["sha256:{digest_of(BOB).hex()}"]\n'
        f'[tenants.root]\nis_admin = true\nkeys = ["sha256:{digest_of(ADMIN).hex()}"]\n'
    )
    path.chmod(0o600)
    with Server(tokenizer, key_file=path) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_endpoint_declares_its_access(locked: Server) -> None:
    app = build_http_app(locked.frontends.servicer, read_timeout_s=60.0)
    found: dict[Access, set[str]] = {access: set() for access in Access}
    for endpoint in app.endpoints:
        found[endpoint.access].add(endpoint.path)
    assert found[Access.PUBLIC] == OPEN
    assert found[Access.ADMINS] == {"/loads/history", "/metrics"}
    for endpoint in app.endpoints:
        answer = httpx.request(endpoint.method, locked.url + endpoint.path.replace("{", "x"))
        is_open = endpoint.access is Access.PUBLIC
        assert (answer.status_code == 200) is is_open, endpoint
        assert (answer.status_code == 401) is not is_open, endpoint


def test_missing_key_gives_openais_error(locked: Server) -> None:
    submitted = list(locked.engine.log.submitted)
    answer = httpx.post(f"{locked.url}/v1/completions", json={"model": "tiny", "prompt": "x"})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    with (
        openai.OpenAI(base_url=f"{locked.url}/v1", api_key="pr-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.models.list()
    assert locked.engine.log.submitted == submitted


def test_key_authenticates_its_tenant(locked: Server) -> None:
    locked.engine.reset()
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=ALICE, max_retries=0) as client:
        client.completions.create(model="tiny", prompt="x", max_tokens=2)
    assert locked.engine.log.submitted[0].tenant == "alice"


def test_metrics_are_for_admins(locked: Server) -> None:
    url = f"{locked.url}/metrics"
    assert httpx.get(url, headers=bearer(ALICE)).status_code == 403
    assert httpx.get(url, headers=bearer(ADMIN)).status_code == 200


def test_each_tenant_has_its_own_calls_in_the_loads(locked: Server) -> None:
    locked.engine.reset()
    locked.engine.is_paused = True
    body = {"model": "tiny", "prompt": "x", "max_tokens": 100, "stream": True}
    url = f"{locked.url}/v1/completions"
    with httpx.Client(headers=bearer(ALICE)) as client, client.stream("POST", url, json=body):
        for key, num_calls in ((ALICE, 1), (BOB, 0), (ADMIN, 1)):
            loads = httpx.get(f"{locked.url}/loads", headers=bearer(key)).json()
            assert len(loads["calls"]) == num_calls
            assert loads["num_blocks"] == 64


def test_clients_of_anthropic_send_a_header_of_their_own(locked: Server) -> None:
    locked.engine.reset()
    body = {"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "x"}]}
    url = f"{locked.url}/v1/messages"
    assert httpx.post(url, json=body, headers={"x-api-key": ALICE}).status_code == 200
    wrong: list[dict[str, str]] = [
        {},
        {"x-api-key": f"{ALICE}0"},
        {"x-api-key": ALICE, "authorization": "Bearer x"},
    ]
    for headers in wrong:
        answer = httpx.post(url, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            401,
            "authentication_error",
        )


def test_unknown_paths_and_methods_reveal_nothing_without_a_key(locked: Server) -> None:
    for method, path in (("GET", "/nothing"), ("PUT", "/health"), ("OPTIONS", "/v1/models")):
        assert httpx.request(method, locked.url + path).status_code == 401
        with_key = httpx.request(method, locked.url + path, headers=bearer(ALICE))
        assert with_key.status_code in (404, 405)


@pytest.mark.parametrize(
    "value",
    ["", "Bearer", f"Basic {ALICE}", ALICE, f"Bearer {ALICE}x", f"Bearer {ALICE[:-1]}"],
)
def test_malformed_authorization_is_rejected(locked: Server, value: str) -> None:
    answer = httpx.get(locked.url + SPECIFIC, headers={"authorization": value})
    assert answer.status_code == 401


TRICKS = [
    b"GET //v1/models HTTP/1.1\r\nHost: x",
    b"GET /health/../v1/models HTTP/1.1\r\nHost: x",
    b"GET /v1/../v1/models HTTP/1.1\r\nHost: x",
    b"GET /health%2f..%2fv1/models HTTP/1.1\r\nHost: x",
    b"GET /%76%31/models HTTP/1.1\r\nHost: x",
    b"GET /V1/models HTTP/1.1\r\nHost: x",
    b"GET /v1/models/ HTTP/1.1\r\nHost: x",
    b"GET /v1/models?/health HTTP/1.1\r\nHost: x",
    b"GET /v1/models#/health HTTP/1.1\r\nHost: x",
    b"GET /v1/models;/health HTTP/1.1\r\nHost: x",
    b"GET v1/models HTTP/1.1\r\nHost: x",
    b"GET http://x/v1/models HTTP/1.1\r\nHost: x",
    b"GET http://x/health/../v1/models HTTP/1.1\r\nHost: x",
    b"GET /v1/models HTTP/1.1\r\nHost: x/health?",
    b"GET /v1/models HTTP/1.1\r\nHost: x/health#",
    b"GET /v1/models HTTP/1.1\r\nHost: x/#",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost/health",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nHost: y",
    b"GET /v1/models HTTP/1.1",
    b"GET /v1/models HTTP/1.0",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Forwarded-Prefix: /health",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Original-URL: /health",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-HTTP-Method-Override: HEAD",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer a\r\nAuthorization: Bearer %b"
    % ALICE.encode(),
    b"HEAD /v1/models HTTP/1.1\r\nHost: x",
    b"GET /health\x00/v1/models HTTP/1.1\r\nHost: x",
    b"GET /metrics HTTP/1.1\r\nHost: x/health?",
    b"GET /docs HTTP/1.1\r\nHost: x/health?",
    b"GET /app.js/../v1/models HTTP/1.1\r\nHost: x",
    b"GET /\xc0\xafv1/models HTTP/1.1\r\nHost: x",
]


@pytest.mark.parametrize("head", TRICKS)
def test_no_spelling_of_a_path_or_host_bypasses_the_key(locked: Server, head: bytes) -> None:
    address = ("127.0.0.1", locked.frontends.http_port or 0)
    with socket.create_connection(address, 60) as connection:
        connection.sendall(head + b"\r\nConnection: close\r\n\r\n")
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := connection.recv(2**16):
                received += chunk
    status = received.split(b" ", 2)[1]
    assert status in (b"400", b"401"), received[:200]
    assert b"owned_by" not in received

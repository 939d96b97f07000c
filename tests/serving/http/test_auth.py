"""Access over HTTP: keys, the names of hosts, and pages of other origins."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

import httpx
import openai
import pytest

from cluster.serving.admin.endpoints import PAGE_PATHS
from cluster.serving.auth import digest_of, new_key
from cluster.serving.http.endpoint import Access
from cluster.serving.http.request_checks import AllowedOrigins
from cluster.serving.http_app import build_http_app
from pagedray.errors import StartupError
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.fake_engine import FakeEngine

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


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def outcome(http: httpx.Client, **headers: str) -> int:
    return http.get("/v1/models", headers=headers).status_code


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1@evil.example",
        "xlocalhost",
        "[::1].evil.example",
        "[evil.example]",
        "1",
        "::1",
        "[127.0.0.1]",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/", "/health", "/docs", "/nothing"])
def test_other_host_names_are_rejected(http: httpx.Client, host: str, path: str) -> None:
    # What a browser sends after evil.example became the address of this machine.
    response = http.get(path, headers={"host": host})
    assert response.status_code == 421
    assert "--allowed-hosts" in response.json()["error"]["message"]


def test_a_rebound_page_gets_no_tokens(http: httpx.Client, engine: FakeEngine) -> None:
    headers = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
    response = http.post("/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 421
    assert engine.log.submitted == []


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:9",
        "10.1.2.3:8000",
        "[::1]",
        "[::1]:8000",
        "localhost",
        "LocalHost:80",
        "localhost.",
    ],
)
def test_addresses_and_localhost_are_served(http: httpx.Client, host: str) -> None:
    assert outcome(http, host=host) == 200


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "https://evil.example:8000",
        "http://localhost:3000",
        "http://localhost",
        "null",
        "",
        "file://",
        "http://127.0.0.1:8000.evil.example",
        "chrome-extension://127.0.0.1:8000",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_sites_are_rejected(
    http: httpx.Client, engine: FakeEngine, origin: str, method: str
) -> None:
    headers = {"host": "127.0.0.1:8000", "origin": origin}
    response = http.request(method, "/v1/chat/completions", json=CHAT, headers=headers)
    assert response.status_code == 403
    assert "access-control-allow-origin" not in response.headers
    assert engine.log.submitted == []


def test_the_servers_own_page_is_served(http: httpx.Client) -> None:
    for host in ("127.0.0.1:8000", "localhost:8000", "[::1]:8000"):
        headers = {"host": host, "origin": f"http://{host}"}
        response = http.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert response.status_code == 200, response.text


def test_rejections_are_counted(http: httpx.Client) -> None:
    http.get("/v1/models", headers={"host": "evil.example"})
    counted = [line for line in http.get("/metrics").text.splitlines() if "forbidden" in line]
    assert any(line.startswith("pagedray_requests_total{") for line in counted)


@pytest.fixture(scope="module")
def with_names(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    with (
        Server(tokenizer, allowed_hosts=("LLM.lan", "app.lan")) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        yield http


def test_further_names_may_be_allowed(with_names: httpx.Client) -> None:
    assert outcome(with_names, host="llm.lan:8000") == 200
    assert outcome(with_names, host="llm.lan", origin="https://app.lan") == 200
    assert outcome(with_names, host="127.0.0.1", origin="http://app.lan:3000") == 200
    assert outcome(with_names, host="evil.example") == 421
    assert outcome(with_names, host="llm.lan", origin="https://evil.example") == 403


def test_all_names_may_be_allowed(tokenizer: Tokenizer) -> None:
    with (
        Server(tokenizer, allowed_hosts=("*",)) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert outcome(http, host="evil.example", origin="http://other.example") == 200


def test_keys_replace_the_check(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[tenants.a]\nkeys = ['sha256:{'0' * 64}']\n")
    path.chmod(0o600)
    with (
        Server(tokenizer, key_file=path) as server,
        httpx.Client(base_url=server.url) as http,
    ):
        assert outcome(http, host="evil.example", origin="http://evil.example") == 401


PAGE = "https://page.example:8443"


@pytest.fixture(scope="module")
def open_server(tokenizer: Tokenizer) -> Iterator[Server]:
    with Server(tokenizer, allowed_origins=AllowedOrigins([PAGE])) as server:
        yield server


def asked(server: Server, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    """Return the answer to what a browser asks before it sends a request."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }
    return httpx.options(f"{server.url}{path}", headers=headers)


def test_a_page_may_ask_and_send(open_server: Server) -> None:
    answer = asked(open_server, PAGE)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert answer.headers["access-control-allow-methods"] == "POST"
    assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
    url = f"{open_server.url}/v1/chat/completions"
    for body in (CHAT, CHAT | {"stream": True}, {"model": "other"}):
        answer = httpx.post(url, json=body, headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize(
    "origin", ["https://other.example", f"{PAGE}0", "https://page.example", "null"]
)
def test_other_pages_may_not(open_server: Server, origin: str) -> None:
    answer = asked(open_server, origin)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_no_page_may_by_default(server: Server) -> None:
    answer = asked(server, PAGE)
    assert answer.status_code == 403
    assert "access-control-allow-origin" not in answer.headers


def test_unknown_paths_and_plain_options_stay_rejected(open_server: Server) -> None:
    assert asked(open_server, PAGE, "/nothing").status_code == 404
    plain = httpx.options(f"{open_server.url}/v1/models", headers={"origin": PAGE})
    assert plain.status_code == 405


def test_all_origins_are_named_by_a_star(tokenizer: Tokenizer) -> None:
    with Server(tokenizer, allowed_origins=AllowedOrigins(["*"])) as server:
        answer = asked(server, "https://any.example")
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (204, "*")


@pytest.mark.parametrize("origin", ["page.example", "ftp://x", "https://*.example", "https://x/y"])
def test_what_is_no_origin_is_rejected(origin: str) -> None:
    with pytest.raises(StartupError, match="--allowed-origins must be"):
        AllowedOrigins([origin])


def test_server_names_its_version_and_load(server: Server) -> None:
    assert set(httpx.get(f"{server.url}/version").json()) == {"version"}
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
    for method in ("GET", "POST"):
        assert httpx.request(method, f"{server.url}/ping").status_code == 200

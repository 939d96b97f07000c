"""What a page of another site may do with a server that requires no keys: nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.text.tokenizer import Tokenizer
    from tests.serving.fake_engine import FakeEngine

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

"""Pages of allowed origins may use the server from a browser, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import pytest

from cluster.serving.http.allowed_origins import AllowedOrigins
from pagedray.errors import StartupError
from tests.serving.conftest import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer

PAGE = "https://page.example:8443"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


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

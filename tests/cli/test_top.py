"""`pagedray top`: its view and its errors."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from cluster.cli.loads_client import LoadsClient
from cluster.cli.top import read_key
from cluster.cli.top_view import TopView, rates_of
from cluster.serving.server_info import CallInfo
from pagedray.errors import EngineError, StartupError
from tests.cli.loads_server import LOADS, serving

if TYPE_CHECKING:
    from pathlib import Path

LATER = replace(LOADS, uptime_s=102.0, num_generated_tokens=9250, num_prompt_tokens=5010)


def drawn(view: TopView, *, width: int = 100, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(view, height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_view_shows_requests_blocks_and_speed() -> None:
    text = "\n".join(drawn(TopView("http://x", LATER, LOADS, history=(1.0, 125.0))))
    for words in (
        *("running 3", "waiting 2", "swapped 1", "queued 2 (700 tokens)"),
        *("generated tokens/s", "125", "150 of 200, 20 cached 75.0%", "10 of 100 10.0%"),
        *("25.0%", "last 12.0 ms", "call-0"),
    ):
        assert words in text


@pytest.mark.parametrize(("width", "height"), [(100, 24), (60, 16), (40, 8), (200, 60), (20, 4)])
def test_view_is_as_large_as_the_terminal(width: int, height: int) -> None:
    lines = drawn(TopView("http://x", LATER, LOADS), width=width, height=height)
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}


def test_ids_and_errors_cannot_steer_the_terminal() -> None:
    call = CallInfo(id="a\x1b[2J\nb", age_s=1.0, num_prompt_tokens=1, num_generated_tokens=1)
    view = TopView("http://x", replace(LOADS, calls=(call,)), None, error="bad\x1b]0;x\x07")
    assert "\x1b" not in "".join(drawn(view))
    assert "a?[2J?b" in "".join(drawn(view))


def test_rates_are_none_after_a_restart_of_the_server() -> None:
    assert rates_of(LATER, LOADS) == (125.0, 5.0, 0.0)
    assert rates_of(LOADS, LATER) == (0.0, 0.0, 0.0)
    assert rates_of(LOADS, None) == (0.0, 0.0, 0.0)


def test_client_reads_what_a_server_writes() -> None:
    with serving(msgspec.json.encode(LOADS)) as (url, keys):
        client = LoadsClient(url + "/", key="secret")
        assert client.read_loads() == LOADS
        client.close()
    assert keys == ["Bearer secret"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b'{"error": {"message": "No such key."}}', 401, "status 401: No such key."),
        (b"<html>", 502, "status 502."),
        (b"{}", 200, "not that of a PagedRay server of this version"),
        (b"\xff", 200, "not that of a PagedRay server of this version"),
    ],
)
def test_client_reports_why_it_has_no_loads(body: bytes, status: int, text: str) -> None:
    with serving(body, status) as (url, _):
        client = LoadsClient(url)
        with pytest.raises(EngineError, match=text):
            client.read_loads()
    with pytest.raises(EngineError, match="Cannot reach the server"):
        client.read_loads()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "http://x:99999"])
def test_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(StartupError, match="--url"):
        LoadsClient(url)


def test_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDRAY_API_KEY", "from-environment")
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert (read_key(None), read_key(file)) == ("from-environment", "from-file")
    with pytest.raises(StartupError, match="Cannot read --api-key-file"):
        read_key(tmp_path / "none")

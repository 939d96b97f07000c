"""`pagedray top`: its view and its errors."""

from __future__ import annotations

import io
import queue
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from cluster.cli.client_flags import read_key
from cluster.cli.commands import main
from cluster.cli.top import LoadsClient, Reading, ServerName, TopView, draw_plot
from cluster.serving.server_info import CallInfo
from pagedray.errors import EngineError, StartupError
from tests.cli.loads_server import HISTORY, LOADS, serving
from tests.cli.terminal_emulator import Terminal
from tests.fakes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.telemetry.load_history import LoadHistory

LATER = replace(LOADS, uptime_s=102.0, num_generated_tokens=9250, num_prompt_tokens=5010)
READING = Reading(loads=LATER, before=LOADS, history=HISTORY)

LEAVE_OWN_SCREEN = b"\x1b[?1049l"


def drawn(reading: Reading, *, width: int = 100, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(TopView("http://x", reading), height=height)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_view_without_history_shows_requests_blocks_and_speed() -> None:
    text = " ".join(
        " ".join(line.strip("│ ") for line in drawn(replace(READING, history=None))).split()
    )
    for words in (
        *("running 3", "waiting 2", "swapped 1", "queued 2 (700 tokens)", "up 1 min 42 s"),
        *("generated tokens/s 125", "[##################......] 150 of 200, 20 cached 75.0%"),
        *("[##......................] 10 of 100 10.0%",),
        *("prefix hits 25.0%", "last step 12.0 ms", "call-0", "require the API key of an admin"),
    ):
        assert words in text


def test_view_shows_drafts_if_there_are_any() -> None:
    assert "drafts" not in "".join(drawn(READING))
    loads = replace(LATER, num_chains=200, num_draft_tokens=800, num_accepted_draft_tokens=480)
    text = " ".join(" ".join(drawn(replace(READING, loads=loads))).replace("│", "").split())
    assert "drafts accepted 60.0% (3.4 tokens a step)" in text


def test_view_shows_ten_minutes_and_latencies() -> None:
    name = ServerName(model="Qwen/Qwen3-8B", version="0.1.0")
    lines = drawn(replace(READING, name=name), width=80)
    assert " PagedRay 0.1.0 Qwen/Qwen3-8B http://x " in lines[0]
    (generated,) = (line for line in lines if "generated tokens/s" in line)
    row, current, plot, highest = generated.strip("│ ").rsplit(maxsplit=3)
    assert (row, current, highest) == ("generated tokens/s", "125", "6,000")
    # Half of the ten minutes, and nothing but rises.
    assert sorted(plot) == list(plot)
    latencies = [line.split()[1:-1] for line in lines if "1,200" in line or "34,000" in line]
    assert latencies == [
        ["first", "token", "250.0", "ms", "500.0", "ms", "1.8", "s", "1,200"],
        ["between", "tokens", "12.0", "ms", "20.0", "ms", "30.0", "ms", "34,000"],
    ]
    assert "call-2" in "".join(lines)
    assert "require the API key" not in "".join(lines)


@pytest.mark.parametrize(
    ("changes", "row", "highest"),
    [
        # The rate since the last reading is above the rates of all samples.
        ({"num_generated_tokens": 209_000}, "generated tokens/s", "100,000"),
        ({"num_running": 2}, "running", "3"),
        ({"num_waiting": 12}, "waiting", "12"),
        ({"num_free_blocks": 20}, "blocks in use", "90.0%"),
        ({"num_free_blocks": 190}, "blocks in use", "25.0%"),
    ],
)
def test_the_highest_value_includes_the_current_one(
    changes: dict[str, int], row: str, highest: str
) -> None:
    loads = replace(LATER, **changes)  # type: ignore[arg-type]  # counts
    (line,) = (one for one in drawn(replace(READING, loads=loads)) if one.startswith(f"│ {row} "))
    assert line.rstrip("│ ").endswith(f" {highest}")


@pytest.mark.parametrize("history", [None, HISTORY, replace(HISTORY, samples=())])
@pytest.mark.parametrize(("width", "height"), [(100, 24), (40, 8), (200, 60), (20, 4)])
def test_view_is_as_large_as_the_terminal(
    width: int, height: int, history: LoadHistory | None
) -> None:
    lines = drawn(replace(READING, history=history), width=width, height=height)
    assert len(lines) == height
    assert {len(line) for line in lines} == {width}


def test_view_is_ascii_where_the_terminal_is() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    call = CallInfo(id=70 * "é", age_s=1.0, num_prompt_tokens=1, num_generated_tokens=1)
    console = Console(file=file, width=60, height=24, color_system=None)
    reading = replace(READING, loads=replace(LATER, calls=(call,)))
    console.print(TopView("http://x", reading), height=24)
    file.seek(0)
    assert "*#" in file.read()


def test_plots_have_the_highest_value_of_each_column() -> None:
    values = [None, 0.0, 1.0, None, 8.0, 2.0]
    # Two of eight intervals are missing; of a column's two values the higher one is drawn.
    plot = draw_plot(values, num_places=8, width=4, maximum=8.0, chars="_.:-=+*#")
    assert plot == " _.#"
    assert draw_plot([0.0] * 9, num_places=2, width=5, maximum=0.0, chars="_#") == "__"


def test_ids_and_errors_cannot_steer_the_terminal() -> None:
    call = CallInfo(id="a\x1b[2J\nb", age_s=1.0, num_prompt_tokens=1, num_generated_tokens=1)
    reading = Reading(loads=replace(LOADS, calls=(call,)), error="bad\x1b]0;x\x07")
    text = "".join(drawn(reading, height=40))
    assert "\x1b" not in text
    assert "a?[2J?b" in text


def test_rates_are_none_after_a_restart_of_the_server() -> None:
    assert READING.rate("num_generated_tokens") == 125.0
    assert Reading(loads=LOADS, before=LATER).rate("num_generated_tokens") == 0.0
    assert Reading(loads=LOADS).rate("num_generated_tokens") == 0.0


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_client_reads_what_a_server_writes(end: str) -> None:
    info = b'{"version": "0.1.0", "model": "m", "num_ranks": 2}'
    history = msgspec.json.encode(HISTORY)
    with serving(msgspec.json.encode(LOADS), history=history, info=info) as (url, received):
        client = LoadsClient(url + end, key="secret")
        name = ServerName(model="m", version="0.1.0")
        assert client.read() == Reading(loads=LOADS, history=HISTORY, name=name)
        assert client.read().before == LOADS
        client.close()
    assert ("/loads/history", "Bearer secret") in received


def test_a_key_that_may_not_read_the_history_is_not_tried_again() -> None:
    readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
    is_closed = threading.Event()
    with serving(msgspec.json.encode(LOADS)) as (url, received):
        arguments = {"every_s": 0.01, "is_closed": is_closed}
        thread = threading.Thread(target=LoadsClient(url).poll, args=(readings,), kwargs=arguments)
        thread.start()
        wait_for(lambda: len(received) >= 5, 30.0)
        is_closed.set()
        thread.join()
    assert readings.get() == Reading(loads=LOADS)
    assert [path for path, _ in received].count("/loads/history") == 1


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (
            b'{"error": {"message": "No such key."}}',
            401,
            r"No such key\. Use --api-key-file or set PAGEDRAY_API_KEY\.$",
        ),
        (b'{"error": {"message": "a\\u001b[2Jb"}}', 403, r"status 403: a\?\[2Jb$"),
        (b"<html>", 502, "status 502."),
        (b"<html>", 404, r"^http://[\d.:]+ is not a PagedRay server: GET /loads returned 404\.$"),
        (b"", 405, r"is not a PagedRay server: GET /loads returned 405\.$"),
        (b'{"error": {"message": "Not Found"}}', 404, "is not a PagedRay server: GET /loads"),
        (b"{}", 200, "is not a PagedRay server of this version: GET /loads returned an"),
        (b"\xff", 200, "is not a PagedRay server of this version: GET /loads returned an"),
    ],
)
def test_client_reports_why_it_has_no_loads(body: bytes, status: int, text: str) -> None:
    with serving(body, status) as (url, _):
        client = LoadsClient(url)
        with pytest.raises(EngineError, match=text):
            client.read()
    place = url.removeprefix("http://")
    with pytest.raises(
        EngineError, match=f"^Cannot reach the server at {place}: Connection refused.$"
    ):
        client.read()


def test_other_protocols_are_not_printed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = LoadsClient(f"http://127.0.0.1:{listener.getsockname()[1]}")

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"\x00\x00\x1b[2J\n")

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(
            EngineError, match=r"^The server does not respond in HTTP; the URL must"
        ):
            client.read()
        thread.join()
    client.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "The URL must look like"),
        ("ftp://x", "The URL must look like"),
        ("http://", "The URL must look like"),
        (":8000", "The URL must look like"),
        ("http://x:99999", "'http://x:99999' is not a URL: Port out of range"),
        ("x:99999", "'x:99999' is not a URL: Port out of range"),
        ("http://[::1", r"'http://\[::1' is not a URL: Invalid IPv6 URL"),
        ("http://x/a b", "'http://x/a b' is not a URL: spaces"),
    ],
)
def test_invalid_url_is_rejected(url: str, message: str) -> None:
    with pytest.raises(StartupError, match=f"^{message}"):
        LoadsClient(url)


@pytest.mark.parametrize("form", ["{url}", "--url={url}", "{host}", "{url}/v1"])
def test_the_address_is_taken_in_each_obvious_form(
    form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(msgspec.json.encode(LOADS)) as (url, _):
        given = form.format(url=url, host=url.removeprefix("http://"))
        assert main(["top", given, "--once"]) == 0
    assert "call-1" in capsys.readouterr().out


def test_two_addresses_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["top", "127.0.0.1:1", "--url", "127.0.0.1:2"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_key_comes_from_a_file_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDRAY_API_KEY", "from-environment")
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert (read_key(None), read_key(file)) == ("from-environment", "from-file")
    with pytest.raises(StartupError, match="Cannot read --api-key-file"):
        read_key(tmp_path / "none")


@pytest.fixture
def url() -> Iterator[str]:
    history = msgspec.json.encode(HISTORY)
    with serving(msgspec.json.encode(LOADS), history=history) as (url, _):
        yield url


def test_it_fits_the_terminal_and_ends_with_q(url: str) -> None:
    with Terminal(["top", f"--url={url}", "--every-s=0.2"]) as terminal:

        def is_whole(text: str) -> bool:
            has_calls = "150 of 200" in text and "call-5" in text
            return has_calls and text.rstrip().endswith("╯")

        wait_for(lambda: is_whole(terminal.text))
        terminal.resize(60, 16)

        def is_smaller(text: str) -> bool:
            return text.count("│") >= 28 and "call-5" not in text and "150 of 200" in text

        wait_for(lambda: is_smaller(terminal.text))
        terminal.press(b"x")
        terminal.press(b"q")
        assert terminal.process.wait(60.0) == 0
        terminal.join()
        assert LEAVE_OWN_SCREEN in terminal.written


def test_it_is_readable_in_80_columns_without_colors(url: str) -> None:
    arguments = ["top", f"--url={url}"]
    with Terminal(arguments, columns=80, lines=24, variables={"NO_COLOR": "1"}) as terminal:
        for words in (
            *("first token, p95", "10 min ago", "▄▄▅▅", "6,000", "600.0 ms", "call-2"),
            *("between tokens   12.0 ms   20.0 ms  30.0 ms  34,000", "prefix hits 25.0%"),
        ):
            # It may be drawing at the moment.
            wait_for(lambda: words in terminal.text)  # noqa: B023
        assert {cell.fg for cell in terminal.cells} == {"default"}
        terminal.press(b"q")
        assert terminal.process.wait(60.0) == 0


def test_a_hanging_server_does_not_block_the_keyboard() -> None:
    is_released = threading.Event()
    with (
        serving(msgspec.json.encode(LOADS), until=is_released) as (url, _),
        Terminal(["top", f"--url={url}"], patience_s=3600.0) as terminal,
    ):
        try:
            wait_for(lambda: "Connecting" in terminal.text)
            terminal.press(b"q")
            assert terminal.process.wait(60.0) == 0
        finally:
            is_released.set()


def test_a_terminal_that_cannot_move_the_cursor_is_rejected() -> None:
    with Terminal(["top"], variables={"TERM": "dumb"}) as terminal:
        assert terminal.process.wait(60.0) == 2
        wait_for(lambda: "use --once" in terminal.text)


def test_an_unreachable_server_is_reported_and_ctrl_c_quits() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Terminal(["top", f"--url={url}", "--every-s=0.2"]) as terminal:
            wait_for(lambda: "Cannot reach the server" in terminal.text)
            terminal.press(b"\x03")
            assert terminal.process.wait(60.0) == 130
            assert "Traceback" not in terminal.text

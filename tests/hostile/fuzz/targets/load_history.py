"""What a server says of its load, which `pagedray top` draws."""

from __future__ import annotations

import io
from dataclasses import replace

import msgspec
from rich.console import Console

from cluster.cli.top import Reading, TopView
from cluster.serving.telemetry.load_history import LoadHistory
from tests.cli.loads_server import HISTORY, LOADS
from tests.cli.test_top import LATER
from tests.hostile.fuzz.target import Target


def run(data: bytes) -> None:
    """Draw a picture of the terminal's size, or reject the response."""
    try:
        history = msgspec.json.decode(data, type=LoadHistory)
    except msgspec.MsgspecError:
        return
    drawn = io.StringIO()
    console = Console(file=drawn, width=80, height=24, color_system=None)
    reading = Reading(loads=LATER, before=LOADS, history=history)
    console.print(TopView("http://x", reading), height=24)
    assert "\x1b" not in drawn.getvalue()


TARGET = Target(
    run=run,
    seeds=(msgspec.json.encode(replace(HISTORY, samples=HISTORY.samples[:2])),),
    words=(b"null", b"-1", b"0", b"1e308", b"-0.0", b"9" * 30, b"1e-320"),
    max_bytes=1024,
)

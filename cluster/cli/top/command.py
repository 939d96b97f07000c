"""`pagedray top`: a live view of a server's load in the terminal, until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from cluster.cli.top.loads_client import LoadsClient
from cluster.cli.top.loads_poller import LoadsPoller
from cluster.cli.top.view import TopView
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.server_info import ServerLoads

__all__ = ["top"]

_LOOK_S = 0.1
_PRINTED_LINES = 24
_END_KEYS = frozenset(b"qQ\x04")


def top(url: str, *, key: str | None, ca_file: Path | None, every_s: float, is_once: bool) -> int:
    """Show the load of a server every `every_s` seconds, or once. Raises PagedRayError."""
    console = Console()
    client = LoadsClient(url, key=key, ca_file=ca_file)
    if is_once:
        with closing(client):
            view = TopView(
                url, client.read_loads(), history=client.read_history(), name=client.read_name()
            )
            console.print(view, height=_PRINTED_LINES)
        return 0
    if not (sys.stdin.isatty() and console.is_terminal) or console.is_dumb_terminal:
        raise StartupError("pagedray top needs a terminal; use --once to print the load once.")
    with _single_keys() as keys, closing(LoadsPoller(client, every_s)) as poller:
        _show(console, poller, url, keys)
    return 0


def _show(console: Console, poller: LoadsPoller, url: str, keys: int) -> None:
    loads: ServerLoads | None = None
    before: ServerLoads | None = None
    size = os.get_terminal_size(keys)
    # `Live` draws on the alternate screen and restores the old screen.
    with Live(TopView(url, None), console=console, screen=True, auto_refresh=False) as live:
        while not _wait_for_end(keys):
            if (reading := poller.take_reading()) is not None:
                if reading.loads is not None:
                    before, loads = loads, reading.loads
                view = TopView(
                    url,
                    loads,
                    before=before,
                    history=reading.history,
                    name=reading.name,
                    error=reading.error,
                )
                live.update(view, refresh=True)
            # The terminal may be resized between readings.
            elif (new_size := os.get_terminal_size(keys)) != size:
                size = new_size
                live.refresh()


def _wait_for_end(keys: int) -> bool:
    """Wait `_LOOK_S`; return whether the user pressed a key that ends it."""
    readable, _, _ = select.select([keys], [], [], _LOOK_S)
    if not readable:
        return False
    pressed = os.read(keys, 64)
    return not pressed or any(key in _END_KEYS for key in pressed)


@contextmanager
def _single_keys() -> Iterator[int]:
    """Put the terminal into cbreak mode, without echo, and restore it on exit."""
    terminal = sys.stdin.fileno()
    saved = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, saved)

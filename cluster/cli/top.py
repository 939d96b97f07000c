"""`pagedray top`: a live view of a server's load in the terminal, until q or Ctrl-C."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections import deque
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live

from cluster.cli.loads_client import LoadsClient
from cluster.cli.loads_poller import LoadsPoller
from cluster.cli.top_view import TopView, rates_of
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.serving.server_info import ServerLoads

__all__ = ["read_key", "top"]

_LOOK_S = 0.1
_NUM_RATES = 240
_END_KEYS = frozenset(b"qQ\x04")
_MAX_KEY_BYTES = 4096


def top(url: str, *, key: str | None, ca_file: Path | None, every_s: float, is_once: bool) -> int:
    """Show the load of a server every `every_s` seconds, or once. Raises PagedRayError."""
    console = Console()
    client = LoadsClient(url, key=key, ca_file=ca_file)
    if is_once:
        with closing(client):
            console.print(TopView(url, client.read_loads(), None), height=20)
        return 0
    if not (sys.stdin.isatty() and console.is_terminal):
        raise StartupError("pagedray top needs a terminal; use --once to print the load once.")
    with _single_keys() as keys, closing(LoadsPoller(client, every_s)) as poller:
        _show(console, poller, url, keys)
    return 0


def read_key(path: Path | None) -> str | None:
    """Return the key in a file, or else PAGEDRAY_API_KEY. Raises StartupError."""
    if path is None:
        return os.environ.get("PAGEDRAY_API_KEY") or None
    try:
        with path.open(encoding="utf-8") as file:
            key = file.read(_MAX_KEY_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"Cannot read --api-key-file {path}: {error}.") from error
    if not key:
        raise StartupError(f"--api-key-file {path} is empty.")
    return key


def _show(console: Console, poller: LoadsPoller, url: str, keys: int) -> None:
    loads: ServerLoads | None = None
    before: ServerLoads | None = None
    rates: deque[float] = deque(maxlen=_NUM_RATES)
    size = os.get_terminal_size(keys)
    # `Live` draws on the alternate screen and restores the old one.
    with Live(TopView(url, None, None), console=console, screen=True, auto_refresh=False) as live:
        while not _is_ended(keys):
            if (reading := poller.take_reading()) is not None:
                if reading.loads is not None:
                    before, loads = loads, reading.loads
                    if before is not None:
                        rates.append(rates_of(loads, before)[0])
                view = TopView(url, loads, before, history=rates, error=reading.error)
                live.update(view, refresh=True)
            # The terminal may be resized between readings.
            elif (new_size := os.get_terminal_size(keys)) != size:
                size = new_size
                live.refresh()


def _is_ended(keys: int) -> bool:
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

"""Polls a server's load in a thread, so that a slow server does not block the display."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.cli.top.loads_client import ServerName
from cluster.serving.server_info import ServerLoads
from cluster.serving.telemetry.load_history import LoadHistory
from pagedray.errors import EngineError

if TYPE_CHECKING:
    from cluster.cli.top.loads_client import LoadsClient

__all__ = ["LoadsPoller", "Reading"]

_HISTORY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One reading of a server's load, or the error that it failed with."""

    loads: ServerLoads | None
    history: LoadHistory | None
    """The latest history, or None if the key may not read it or none was read."""
    name: ServerName
    error: str = ""


class LoadsPoller:
    """Polls a server every `every_s` seconds until it is closed."""

    def __init__(self, client: LoadsClient, every_s: float) -> None:
        """Takes over `client` and closes it."""
        self._client = client
        self._every_s = every_s
        self._history: LoadHistory | None = None
        self._name = ServerName()
        # A server takes a sample every five seconds.
        self._next_history_s = 0.0
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        # A daemon: a server that does not respond must not delay the exit.
        threading.Thread(target=self._poll, name="pagedray-loads", daemon=True).start()

    def take_reading(self) -> Reading | None:
        """Return the oldest reading not taken yet, or None."""
        try:
            return self._readings.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Stop after the reading under way."""
        self._is_closed.set()

    def _poll(self) -> None:
        while True:
            self._readings.put(self._read())
            if self._is_closed.wait(self._every_s):
                self._client.close()
                return

    def _read(self) -> Reading:
        loads: ServerLoads | None = None
        error = ""
        try:
            loads = self._client.read_loads()
            if not self._name.model:
                self._name = self._client.read_name()
            if time.monotonic() >= self._next_history_s:
                self._history = self._client.read_history()
                # A key that may not read it is not tried again.
                wait_s = float("inf") if self._history is None else _HISTORY_S
                self._next_history_s = time.monotonic() + wait_s
        except EngineError as caught:
            error = str(caught)
        return Reading(loads=loads, history=self._history, name=self._name, error=error)

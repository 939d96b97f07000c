"""Polls a server's load in a thread, so that a slow server does not block the display."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster.serving.server_info import ServerLoads
from pagedray.errors import EngineError

if TYPE_CHECKING:
    from cluster.cli.loads_client import LoadsClient

__all__ = ["LoadsPoller", "Reading"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of a server's load, or the error that it failed with."""

    loads: ServerLoads | None
    error: str = ""


class LoadsPoller:
    """Polls a server every `every_s` seconds until it is closed."""

    def __init__(self, client: LoadsClient, every_s: float) -> None:
        """Takes over `client` and closes it."""
        self._client = client
        self._every_s = every_s
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        # A daemon: a server that does not respond must not delay the exit.
        threading.Thread(target=self._poll, name="loads-poller", daemon=True).start()

    def take_reading(self) -> Reading | None:
        """Return the oldest reading not taken yet, or None."""
        try:
            return self._readings.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        self._is_closed.set()

    def _poll(self) -> None:
        while True:
            try:
                self._readings.put(Reading(self._client.read_loads()))
            except EngineError as error:
                self._readings.put(Reading(None, str(error)))
            if self._is_closed.wait(self._every_s):
                self._client.close()
                return

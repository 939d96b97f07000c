"""Reads a server's loads again and again in a thread, so that a slow server holds nobody up."""

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
    """What one look at the server brought: its loads, or why there are none."""

    loads: ServerLoads | None
    error: str = ""


class LoadsPoller:
    """Looks at a server every so many seconds from its making until it is closed."""

    def __init__(self, client: LoadsClient, every_s: float) -> None:
        """`client` is the poller's from now on; close it with the poller."""
        self._client = client
        self._every_s = every_s
        self._readings: queue.SimpleQueue[Reading] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        # Nobody waits for it in the end: a server that does not answer would hold the user up.
        threading.Thread(target=self._poll, name="loads-poller", daemon=True).start()

    def take_reading(self) -> Reading | None:
        """Return the oldest reading that was not taken, or None if there is none yet."""
        try:
            return self._readings.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Look no more."""
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

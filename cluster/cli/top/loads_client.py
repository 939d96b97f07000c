"""Reads the load of a server and its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cluster.cli.server_connection import ForbiddenError, ServerConnection
from cluster.serving.server_info import ServerLoads
from cluster.serving.telemetry.load_history import LoadHistory
from pagedray.errors import EngineError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["LoadsClient", "ServerName"]


class ServerName(msgspec.Struct, frozen=True):
    """Which model and version of PagedRay a server runs."""

    model: str = ""
    version: str = ""


class LoadsClient(ServerConnection):
    """Reads one server's load over a persistent connection."""

    def __init__(self, url: str, *, key: str | None = None, ca_file: Path | None = None) -> None:
        """Raises StartupError for an invalid URL, key or CA file."""
        super().__init__(url, key=key, ca_file=ca_file, kind="a PagedRay server")

    def read_loads(self) -> ServerLoads:
        """Return the server's current load. Raises EngineError if that fails."""
        return self.get("/loads", ServerLoads)

    def read_history(self) -> LoadHistory | None:
        """Return the last ten minutes, or None if the key is not an admin's.

        Raises EngineError if that fails.
        """
        try:
            return self.get("/loads/history", LoadHistory)
        except ForbiddenError:
            return None

    def read_name(self) -> ServerName:
        """Return the model and version of the server, which are empty if that fails."""
        try:
            return self.get("/server_info", ServerName)
        except EngineError:
            return ServerName()

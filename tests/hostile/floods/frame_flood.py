"""Attacks that send frames as fast as the server takes them."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from tests.hostile.attack import Attack, Findings
from tests.hostile.http2 import Http2Connection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hostile.attack import Target

__all__ = ["FrameFlood"]

_REJECTED_PAUSE_S = 0.05


class FrameFlood(Attack):
    """Connections to gRPC that are opened again whenever the server closes them."""

    num_connections: ClassVar[int] = 2

    @abstractmethod
    def frames(self) -> Iterator[bytes]:
        """Yield what one connection sends, in parts of some KiB."""

    def run(self, target: Target, seconds: float) -> Findings:
        """Send on each connection in turns."""
        end_s = time.monotonic() + seconds
        open_connections: list[tuple[Http2Connection, Iterator[bytes]]] = []
        num_bytes = num_frames = num_opened = 0
        while time.monotonic() < end_s:
            while len(open_connections) < self.num_connections:
                try:
                    open_connections.append((Http2Connection(target.grpc_port), self.frames()))
                    num_opened += 1
                except OSError:
                    time.sleep(_REJECTED_PAUSE_S)
                    break
            for connection, frames in open_connections[:]:
                data = next(frames, None)
                if data is None or not connection.send_frames(
                    data, max(0.1, end_s - time.monotonic())
                ):
                    connection.close()
                    open_connections.remove((connection, frames))
                else:
                    num_bytes += len(data)
                    num_frames += 1
        for connection, _ in open_connections:
            connection.close()
        return Findings(
            figures={
                "parts": num_frames,
                "mib": round(num_bytes / 2**20, 1),
                "connections": num_opened,
            }
        )

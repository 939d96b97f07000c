"""`pagedray deploy hold`: keeps the head of a Ray cluster until its workers have drained.

Ray gives a node the whole of its drain time if something runs on it that cannot move, and Serve's
controller, on the head, cannot. So the head does not drain: before it ends, this command waits for
the workers that drain, which need the head's GCS for that. If only the head ends, no worker begins
to drain, and the head ends at once, so that KubeRay can start the next one.
"""

from __future__ import annotations

import socket
import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # type: ignore[attr-defined]  # generated

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GcsNodes", "hold", "wait_for_drains"]

_NOTICE_S = 10.0
"""Workers that are deleted with the head drain after their hook of 5 s."""
_POLL_S = 1.0
_RPC_TIMEOUT_S = 5.0
_MAX_FAILURES = 3


class Nodes(Protocol):
    """The nodes of a Ray cluster."""

    def num_draining(self) -> int:
        """Return how many nodes drain and have not ended. Raises ConnectionError."""
        ...


class GcsNodes:
    """The GCS's information about the nodes of a Ray cluster."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._socket_address = host, int(port)

    def num_draining(self) -> int:
        """Return how many nodes drain and have not ended. Raises ConnectionError."""
        try:
            # Ray's client takes 40 s to give up where nothing listens.
            socket.create_connection(self._socket_address, _RPC_TIMEOUT_S).close()
            draining: set[str] = set(self._client.get_draining_nodes(timeout=_RPC_TIMEOUT_S))
            nodes = self._client.get_all_node_info(timeout=_RPC_TIMEOUT_S)
        except (ray.exceptions.RayError, OSError) as error:
            raise ConnectionError(f"The GCS at {self._address} does not respond") from error
        alive = {one.hex() for one, node in nodes.items() if node.state == GcsNodeInfo.ALIVE}
        return len(draining & alive)

    @cached_property
    def _client(self) -> Any:  # Any: Ray's module has no types.
        return ray._raylet.GcsClient(address=self._address)  # type: ignore[attr-defined]  # as above


def hold(address: str, *, limit_s: float) -> int:
    """Wait, and print how long; return 0."""
    started_s = time.monotonic()
    reason = wait_for_drains(GcsNodes(address), limit_s=limit_s)
    print(f"{reason} after {time.monotonic() - started_s:.0f} s.")
    return 0


def wait_for_drains(
    nodes: Nodes,
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Return, with the reason in words, when no node drains, or at the limit."""
    started_s = clock()
    num_failures = 0
    while (waited_s := clock() - started_s) < limit_s:
        try:
            num_draining = nodes.num_draining()
            num_failures = 0
        except ConnectionError as error:
            num_failures += 1
            if num_failures == _MAX_FAILURES:
                return str(error)
            num_draining = 0
        else:
            if num_draining == 0 and waited_s >= _NOTICE_S:
                return "No worker is draining"
        sleep(_POLL_S)
    return "The limit is reached"

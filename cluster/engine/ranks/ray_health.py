"""Watches the two Ray processes that replace dead ranks.

They are the cluster's control service (GCS) and the raylet of this node. Steps need neither, so
running requests continue without them until Ray ends this process.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

import ray

from cluster.engine.executor import Outage
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RayHealth"]

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_CONNECT_TIMEOUT_S = 1.0
_MIN_FAILURES = 2
"""Failures in a row before a process counts as gone."""
_REPLACE_WAIT_S = 10.0
"""How long a replacement of ranks waits for GCS to return."""
_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_CLOSE_S = 15.0
"""Time between the end of a drain and the end of this process by Ray."""

_END_TIMEOUT_S = 3.0

Result = TypeVar("Result")


class RayHealth:
    """Notices within a second that GCS or this node's raylet has ended. Thread-safe."""

    def __init__(self, *, owns_ray: bool) -> None:
        """If Ray was started by another process, GCS may be restarted and return."""
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
        host, _, port = context.gcs_address.rpartition(":")
        self._gcs = _Daemon("Ray's control service (GCS)", host.strip("[]"), int(port))
        self._raylet = _Daemon(
            "The raylet of this node", node["NodeManagerAddress"], node["NodeManagerPort"]
        )
        # Ray ends a process that has had no connection to GCS for so long.
        reconnect_s = float(os.environ.get(_RECONNECT_VARIABLE, 60.0))
        self._drain_s = max((reconnect_s - _CLOSE_S) / (1.0 if owns_ray else 2.0), 0.0)
        self._return_s = 0.0 if owns_ray else self._drain_s
        self._outage: Outage | None = None
        self._outage_began_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="pagedray-ray-health", daemon=True).start()

    @property
    def outage(self) -> Outage | None:
        """What ended, if anything did."""
        return self._outage

    def run_unless_out(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns, which needs Ray. Raises StartupError during an outage.

        Calls of Ray may then block for ever, so `call` runs in a thread that is abandoned.
        """
        future = _in_thread(call)
        while True:
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                if future.done():
                    raise
            outage = self._outage
            if outage is None:
                continue
            if outage.is_final or time.monotonic() - self._outage_began_s > _REPLACE_WAIT_S:
                raise StartupError(f"{outage.reason} Ranks cannot be replaced.")

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def end(self, call: Callable[[], object]) -> None:
        """Run `call`, which ends what Ray runs; during an outage, wait at most 3 s."""
        if self._outage is None:
            call()
            return
        try:
            _in_thread(call).result(_END_TIMEOUT_S)
        except Exception as error:
            logger.debug("Ray did not end what it runs: %r", error)

    def _watch(self) -> None:
        while not self._closed.wait(_POLL_S):
            if self._raylet.is_gone():
                self._note(Outage(reason=self._raylet.reason, is_final=True, drain_s=self._drain_s))
                return
            if not self._gcs.is_gone():
                self._end_outage()
                continue
            if self._outage is None:
                self._outage_began_s = time.monotonic()
            is_final = time.monotonic() - self._outage_began_s >= self._return_s
            self._note(Outage(reason=self._gcs.reason, is_final=is_final, drain_s=self._drain_s))

    def _note(self, outage: Outage) -> None:
        if self._outage is None and not outage.is_final:
            logger.warning(
                "%s Ranks that die cannot be replaced; if that lasts %g s, the engine stops.",
                outage.reason,
                self._return_s,
            )
        self._outage = outage

    def _end_outage(self) -> None:
        if self._outage is not None:
            logger.info("%s answers again.", self._gcs.name)
        self._outage = None


class _Daemon:
    """A process of Ray that listens on a TCP port."""

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self.reason = f"{name} at {host}:{port} has ended."
        self._address = (host, port)
        self._num_failures = 0

    def is_gone(self) -> bool:
        """Connect; return whether that has failed several times in a row."""
        try:
            socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S).close()
            self._num_failures = 0
        except (ConnectionRefusedError, TimeoutError):
            self._num_failures += 1
        except OSError:
            # For example, this process has no file descriptors left, which says nothing about Ray.
            pass
        return self._num_failures >= _MIN_FAILURES


def _in_thread(call: Callable[[], Result]) -> Future[Result]:
    # Not an executor's thread, for which the interpreter would wait at its end.
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pagedray-ray-call", daemon=True).start()
    return future

"""Watches the two Ray processes that replace dead ranks.

They are the cluster's control service (GCS) and the raylet of this node. Steps need neither, so
running requests continue without them until Ray ends this process. One that hangs may continue: the
server is not ready meanwhile, and is restarted if that lasts.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from concurrent.futures import wait
from typing import TYPE_CHECKING, TypeVar

import ray

from cluster.engine.executor import Outage
from cluster.engine.ray_cluster.ray_calls import result_unless, start_call
from cluster.engine.ray_cluster.ray_daemon import RayDaemon
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RayHealth"]

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_HANG_S = 10.0
"""How long GCS or the raylet may give no answer; a busy machine takes seconds."""
_LASTING_HANG_S = 40.0
"""Time after which the server exits; after about 60 s, Ray would declare the node dead."""
_REPLACE_WAIT_S = 10.0
"""How long a replacement of ranks waits for GCS or the raylet to return."""
_CLOSE_S = 15.0
"""Time between the end of a drain and the end of this process by Ray."""

_END_TIMEOUT_S = 3.0

Result = TypeVar("Result")


class RayHealth:
    """Notices within seconds that GCS or this node's raylet has ended or hangs. Thread-safe.

    A raylet whose socket was removed, for example by a program that cleans /tmp, counts as ended:
    no new process can connect to it.
    """

    def __init__(self, *, reconnect_s: float, can_return: bool) -> None:
        """Ray ends a process that has had no connection to GCS for `reconnect_s`.

        `can_return` is true if a GCS that has ended may be started again.
        """
        context = ray.get_runtime_context()
        node_id = context.get_node_id()
        (node,) = (node for node in ray.nodes() if node["NodeID"] == node_id)
        host, _, port = context.gcs_address.rpartition(":")
        self._gcs = RayDaemon("Ray's control service (GCS)", host.strip("[]"), int(port))
        self._raylet = RayDaemon(
            "The raylet of this node", node["NodeManagerAddress"], node["NodeManagerPort"]
        )
        self._socket: str = node["RayletSocketName"]
        self._has_socket = not _is_missing(self._socket)
        self._drain_s = max((reconnect_s - _CLOSE_S) / (2.0 if can_return else 1.0), 0.0)
        self._return_s = self._drain_s if can_return else 0.0
        self._outage: Outage | None = None
        self._outage_began_s = 0.0
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="pagedray-ray-health", daemon=True).start()

    @property
    def outage(self) -> Outage | None:
        """What has ended or hangs, if anything does."""
        return self._outage

    def wait_for_outage(self, timeout_s: float) -> Outage | None:
        """Return the outage, also if it is only noticed within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._outage is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return self._outage

    def run_unless_out(self, call: Callable[[], Result]) -> Result:
        """Return what `call` returns, which needs Ray. Raises StartupError during an outage.

        Calls to Ray may then block forever, so the call is abandoned, or fail at once.
        """
        self._check_outage()
        try:
            return result_unless(self._check_outage, call, period_s=_POLL_S)
        except Exception:
            self._check_outage()
            raise

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()

    def end(self, call: Callable[[], object]) -> None:
        """Run `call`, which ends what Ray runs; during an outage, wait at most 3 s.

        The outage may begin during the call.
        """
        ending = start_call(call)
        while self._outage is None:
            if wait((ending,), _POLL_S).done:
                break
        try:
            ending.result(_END_TIMEOUT_S)
        except Exception as error:
            if self._outage is None:
                raise
            logger.debug("Ray did not end its processes: %r", error)

    def _check_outage(self) -> None:
        """Raise StartupError if there is an outage that does not end soon."""
        outage = self._outage
        if outage is None:
            return
        if outage.is_final or time.monotonic() - self._outage_began_s > _REPLACE_WAIT_S:
            raise StartupError(f"{outage.reason} Ranks cannot be replaced.")

    def _watch(self) -> None:
        daemons = self._raylet, self._gcs
        while not self._closed.wait(_POLL_S):
            now_s = time.monotonic()
            for daemon in daemons:
                daemon.observe(now_s)
            outage = self._found(now_s)
            self._log_change(outage)
            if self._outage is None:
                self._outage_began_s = now_s
            self._outage = outage
            if self._gcs.has_ended:
                _end_error_listener()
            if self._raylet.has_ended:
                break
        for daemon in daemons:
            daemon.close()

    def _found(self, now_s: float) -> Outage | None:
        """Return what the last observations show."""
        if self._raylet.has_ended:
            return self._ended(self._raylet, is_final=True)
        if self._has_socket and _is_missing(self._socket):
            return self._unavailable(f"Ray's socket {self._socket} was removed.", is_final=True)
        if self._gcs.has_ended:
            ended_s = 0.0 if self._outage is None else now_s - self._outage_began_s
            return self._ended(self._gcs, is_final=ended_s >= self._return_s)
        silent = max(self._raylet, self._gcs, key=lambda daemon: daemon.silence_s)
        if silent.silence_s < _HANG_S:
            return None
        is_final = silent.silence_s >= _LASTING_HANG_S
        return self._unavailable(f"{silent.place} hangs.", is_final=is_final)

    def _unavailable(self, reason: str, *, is_final: bool) -> Outage:
        return Outage(reason=reason, is_final=is_final, is_ready=False, drain_s=self._drain_s)

    def _ended(self, daemon: RayDaemon, *, is_final: bool) -> Outage:
        return Outage(
            reason=f"{daemon.place} has ended.",
            is_final=is_final,
            is_ready=not is_final,
            drain_s=self._drain_s,
        )

    def _log_change(self, outage: Outage | None) -> None:
        if outage is None and self._outage is not None:
            logger.info("Ray responds again; ranks that die can be replaced.")
        if outage is not None and self._outage is None and not outage.is_final:
            logger.warning(
                "%s Ranks that die cannot be replaced; if that lasts %g s, the engine stops.",
                outage.reason,
                self._return_s if outage.is_ready else _LASTING_HANG_S - _HANG_S,
            )


def _is_missing(path: str) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        # This says nothing about the file.
        return False
    return False


def _end_error_listener() -> None:
    """End the thread of Ray that prints errors: without GCS, it keeps a core and the GIL busy."""
    ray._private.worker.global_worker.threads_stopped.set()

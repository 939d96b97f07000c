"""Watches the two Ray processes that replace dead ranks.

They are the cluster's control service (GCS) and the raylet of this node. Steps need neither, so
running requests continue without them until Ray ends this process. A process that hangs may
continue: the server is not ready meanwhile, and is restarted if that lasts.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

import grpc
import ray

from cluster.engine.executor import Outage
from cluster.engine.watchdog import ProgressClock
from pagedray.errors import StartupError, WorkerError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["RayDaemon", "RayHealth", "result_unless", "start_call"]

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
_CONNECT_TIMEOUT_S = 0.25
"""A refusal by a host that runs comes at once."""
_MIN_REFUSALS = 2
"""Refused connections in a row after which a process counts as ended."""
_CALL_PERIOD_S = 1.0
_CALL_TIMEOUT_S = 5.0
_METHOD = "/grpc.health.v1.Health/Check"
_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    # By default, minutes may pass until it connects again to a process that has returned.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Its connection is not shared with another channel of this process.
    ("grpc.use_local_subchannel_pool", 1),
)
_NO_ANSWER = (
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)


class RayHealth:
    """Notices within seconds that GCS or this node's raylet has ended or hangs. Thread-safe.

    A raylet without its socket, for example after a program has cleaned /tmp, counts as ended: no
    new process can connect to it.
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
        """A description of the process that has ended or hangs, or None."""
        return self._outage

    def wait_for_outage(self, timeout_s: float) -> Outage | None:
        """Return the outage, also if it is only noticed within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._outage is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
        return self._outage

    def run_unless_out(self, call: Callable[[], Result]) -> Result:
        """Return the result of `call`, which needs Ray.

        Raises StartupError during an outage. Calls to Ray may then block forever, so the call is
        abandoned, or fail at once.
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
        """Run `call`, which ends processes of Ray; during an outage, wait at most 3 s.

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
        """Return the outage that the last observations show."""
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


class RayDaemon:
    """A process of Ray that serves gRPC on a TCP port. Used by one thread.

    Another thread calls the process. It is never started again, which could fail.
    """

    def __init__(self, name: str, host: str, port: int) -> None:
        self.name = name
        self.place = f"{name} at {host}:{port}"
        self._address = (host, port)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._channel = grpc.insecure_channel(target, _CHANNEL_OPTIONS)
        self._num_answers = 0
        self._clock = ProgressClock()
        self._num_refusals = 0
        self._closed = threading.Event()
        self.silence_s = 0.0
        """For how long it has not answered, as far as that time was observed.

        It is 0 before the first answer: with TLS, for example, there is none.
        """
        threading.Thread(target=self._run_calls, name="pagedray-ray-calls", daemon=True).start()

    @property
    def has_ended(self) -> bool:
        """Whether nothing listens on its port."""
        return self._num_refusals >= _MIN_REFUSALS

    def observe(self, now_s: float) -> None:
        """Connect, and look for answers; must be called several times a second."""
        self._connect()
        self.silence_s = self._clock.silence_s(
            now_s, self._num_answers, is_expected=not self._num_answers or self.has_ended
        )

    def close(self) -> None:
        """Close the channel."""
        self._closed.set()
        self._channel.close()

    def _run_calls(self) -> None:
        """Call the process once a second until the channel is closed."""
        check = self._channel.unary_unary(_METHOD)  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
        is_logged = False
        while not self._closed.is_set():
            try:
                check(b"", timeout=_CALL_TIMEOUT_S)
                self._num_answers += 1
            except grpc.RpcError as error:
                # Also an error shows that the process runs, such as a rejected token.
                self._num_answers += error.code() not in _NO_ANSWER
            except Exception:
                # gRPC reports a closed channel with a ValueError.
                if self._closed.is_set():
                    return
                if not is_logged:
                    logger.exception("%s could not be called; trying again.", self.name)
                is_logged = True
            self._closed.wait(_CALL_PERIOD_S)

    def _connect(self) -> None:
        try:
            socket.create_connection(self._address, timeout=_CONNECT_TIMEOUT_S).close()
            self._num_refusals = 0
        except ConnectionRefusedError:
            self._num_refusals += 1
        except OSError:
            # For example, this process has no file descriptors left, which says nothing about Ray.
            pass


def start_call(call: Callable[[], Result]) -> Future[Result]:
    """Run a call in a thread of its own, for which the interpreter does not wait at its end.

    Raises WorkerError if the system has no more threads.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name="pagedray-ray-call", daemon=True).start()
    except RuntimeError as error:
        raise WorkerError(f"Ray could not be called: {error}.") from error
    return future


def result_unless(
    check: Callable[[], None], call: Callable[[], Result], *, period_s: float
) -> Result:
    """Return the result of `call`, or raise its error.

    While it runs, `check` is called every `period_s`; if that raises, the call is abandoned.
    """
    future = start_call(call)
    # Not `future.result`, which may time out just before the call returns.
    while not wait((future,), period_s).done:
        check()
    return future.result()

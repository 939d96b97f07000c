"""Tells whether a process of Ray answers, has ended or hangs.

A connection that is refused shows that the process has ended. A process that is stopped or stuck
still gets connections from the kernel, so that it also has to answer calls.
"""

from __future__ import annotations

import logging
import socket
import threading

import grpc

from cluster.engine.faults.watchdog import ProgressClock

__all__ = ["RayDaemon"]

logger = logging.getLogger(__name__)

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
                # Also an error shows that the process runs, such as one about a token.
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

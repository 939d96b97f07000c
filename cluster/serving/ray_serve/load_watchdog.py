"""Ends a replica that hangs while it loads, from a child process.

Ray Serve checks the health of replicas only once they have started, and a start has no limit. A
replica that hangs cannot end itself, so a child process does; Serve then starts another one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, BinaryIO, Generic, Self, TypeVar

from pagedray.machine import child_environment

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["LoadWatchdog"]

_MODULE = "cluster.serving.ray_serve.load_watchdog"
_SILENCE_S = 60.0
"""Imports may delay the heartbeat, as they may in a rank."""
_BEATS_PER_SILENCE = 20
_CLOSE_WAIT_S = 5.0

Replica = TypeVar("Replica")


class LoadWatchdog:
    """Watches the current process until it is closed."""

    def __init__(self, *, timeout_s: float | None, silence_s: float = _SILENCE_S) -> None:
        """The process is killed when it does not run for `silence_s`, or after `timeout_s`."""
        self._period_s = silence_s / _BEATS_PER_SILENCE
        limits = [str(silence_s), "inf" if timeout_s is None else str(timeout_s)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(os.getpid()), *limits],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
        )
        self._is_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._beat, name="pagedray-load-watchdog", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the watch; closing twice is harmless."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._thread.join()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        # The process may have been killed.
        with contextlib.suppress(OSError):
            while not self._is_closed.wait(self._period_s):
                pipe.write(b".")


def _problem(beats: BinaryIO, silence_s: float, timeout_s: float) -> str | None:
    """Return why the process that writes to `beats` must end; None once it has closed them."""
    period_s = silence_s / _BEATS_PER_SILENCE
    pulse = Pulse[str](period_s=period_s, limit_s=silence_s)
    loaded_s, ticked_s = 0.0, time.monotonic()
    while True:
        readable, _, _ = select.select([beats], [], [], period_s)
        if readable:
            if not os.read(beats.fileno(), 4096):
                return None
            pulse.note_answer("replica")
        now_s = time.monotonic()
        elapsed_s, ticked_s = now_s - ticked_s, now_s
        # A pause of the machine does not count.
        loaded_s += min(elapsed_s, 2 * period_s)
        if pulse.tick(("replica",), elapsed_s):
            return f"did not respond for {silence_s:g} s while it loaded"
        if loaded_s > timeout_s:
            return f"did not load within {timeout_s:g} s"


def main() -> None:
    """Watch the parent process."""
    process_id, silence_s, timeout_s = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    # Serve stops replicas by signals to their process groups; the closed pipe ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    problem = _problem(sys.stdin.buffer, silence_s, timeout_s)
    if problem is not None and os.getppid() == process_id:
        sys.stderr.write(f"The replica (process {process_id}) {problem}; ending it.\n")
        sys.stderr.flush()
        os.kill(process_id, signal.SIGKILL)


class Pulse(Generic[Replica]):
    """How long each replica has been silent, in time that passed for this process too."""

    def __init__(self, *, period_s: float, limit_s: float) -> None:
        """`tick` is called every `period_s`; a replica may be silent for `limit_s`."""
        self._period_s = period_s
        self._limit_s = limit_s
        self._silent_s: dict[Replica, float] = {}
        self.silent: frozenset[Replica] = frozenset()
        """Replicas that have not responded for too long; a new set when they change."""

    def note_answer(self, replica: Replica) -> None:
        """Record that a replica has answered."""
        self._silent_s[replica] = 0.0
        if replica in self.silent:
            self.silent -= {replica}

    def tick(self, replicas: Collection[Replica], elapsed_s: float) -> list[Replica]:
        """Let time pass; return the replicas that have just been silent for too long."""
        # If this process was late, it may have been paused, with the replicas.
        counted_s = min(elapsed_s, 2 * self._period_s)
        before = self._silent_s
        self._silent_s = {one: before.get(one, 0.0) + counted_s for one in replicas}
        silent = frozenset(one for one in replicas if self._silent_s[one] > self._limit_s)
        if silent != self.silent:
            self.silent = silent
        return [one for one in silent if before.get(one, 0.0) <= self._limit_s]


if __name__ == "__main__":
    main()

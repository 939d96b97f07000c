"""Ends a process when the program that started it ends in any way, SIGKILL included."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Self

_ROOT = Path(__file__).resolve().parent.parent
_PROGRAM = """
read -r _ && exit
kill -INT "$0"
for _ in $(seq "$1"); do
    kill -0 "$0" || exit
    sleep 0.1
done
kill -KILL "-$0"
"""
"""A line means that the server has ended; the input ends without one if the program is killed."""


class OrphanGuard:
    """A shell that waits for the end of this process, and then interrupts a server.

    The server, which leads a process group, is killed with its group after `grace_s`. A context
    manager: on exit, the guard is released.
    """

    def __init__(
        self, server: subprocess.Popen[str] | subprocess.Popen[bytes], *, grace_s: float = 60.0
    ) -> None:
        self._server = server
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _PROGRAM, str(server.pid), str(round(grace_s * 10))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def stop_server(self, number: signal.Signals, *, timeout_s: float = 60.0) -> None:
        """Send the server a signal, kill its group if it does not end in time, and release."""
        self._server.send_signal(number)
        try:
            self._server.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self.release()

    def release(self) -> None:
        """End the shell once the server has ended."""
        self._shell.communicate(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def guarded_process(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    stdout: int | IO[str] = subprocess.DEVNULL,
    stderr: int | IO[str] | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in the root folder and in its own session; on exit, it is killed if it runs."""
    with (
        subprocess.Popen(
            command,
            cwd=_ROOT,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        ) as process,
        OrphanGuard(process),
    ):
        try:
            yield process
        finally:
            process.kill()


def end_with_parent() -> None:
    """End this process, which multiprocessing has started, as soon as its parent has ended.

    The worker of a pool would wait for calls forever.
    """

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()

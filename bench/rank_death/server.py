"""A server whose ranks are killed, and its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from bench.records.machine import free_port
from tests.orphan_guard import OrphanGuard

__all__ = ["Server"]

_ROOT = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S = 400.0
_HEAL_TIMEOUT_S = 120.0
_DIED = "A rank died"
_HEALED = re.compile(r"Replaced ranks? .*")


class Server:
    """`pagedray serve` in a process of its own, whose log is kept."""

    def __init__(self, folder: Path, log: Path, arguments: list[str]) -> None:
        self.port = free_port()
        self.lines: list[tuple[float, str]] = []
        """With the time at which each was read."""
        self._is_ready = threading.Event()
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "cluster.cli", "serve", str(folder)),
                *(f"--grpc-port={self.port}", "--http-port=0", "--log-level=info"),
                *arguments,
            ],
            cwd=_ROOT,
            env={**os.environ, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._guard = OrphanGuard(self._process)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        """Return when requests are accepted. Raises RuntimeError if that takes too long."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_ready.wait(0.2):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("The server did not start; see its log.")

    def processes(self, method: str = "") -> list[psutil.Process]:
        """Return the processes of ranks and spares that run a method, oldest first."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if f"GpuWorker{method}" in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda process: process.create_time())

    def healed_line(self, number: int) -> str:
        """Return the server's account of a replacement; waits for it."""
        deadline_s = time.monotonic() + _HEAL_TIMEOUT_S
        while time.monotonic() < deadline_s:
            found = [match[0] for _, line in self.lines if (match := _HEALED.search(line))]
            if len(found) > number:
                return found[number]
            time.sleep(0.1)
        return ""

    def noticed_s(self, killed_s: float) -> float:
        """Return the time from a kill to the line that reports it, or infinity."""
        after = (at_s for at_s, line in self.lines if at_s > killed_s and _DIED in line)
        return next(after, float("inf")) - killed_s

    def close(self) -> None:
        """Stop the server, by force if it does not stop within a minute."""
        self._guard.stop_server(signal.SIGTERM)
        self._reader.join()
        self._log.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            self._log.write(line)
            self._log.flush()
            if line.startswith("Ready:"):
                self._is_ready.set()

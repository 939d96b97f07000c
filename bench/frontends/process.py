"""A server that runs the frontends of a checkout, as `bench.frontends` drives it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Self

SERVER_CORE = 0
HERE = Path(__file__).resolve().parents[2]


class FrontendProcess:
    """A process that runs `bench.frontend_server` of a checkout."""

    def __init__(self, counter_path: Path, checkout: Path = HERE) -> None:
        command = [sys.executable, "-m", "bench.frontend_server", "--core", str(SERVER_CORE)]
        self._process = subprocess.Popen(
            [*command, "--counter", str(counter_path)],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ports = self._hear()
        self.grpc_port, self.http_port = int(ports["grpc_port"]), int(ports["http_port"])

    def set_pace(self, *, step_s: float, lead: int) -> None:
        """Wait until no request runs, then set the pace of the steps."""
        self._ask({"step_s": step_s, "lead": lead})

    def usage(self) -> tuple[float, float]:
        """Return the CPU seconds of the process, and of its engine alone."""
        used = self._ask({})
        return used["cpu_s"], used["engine_cpu_s"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _ask(self, what: dict[str, float]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def _hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        heard: dict[str, float] = json.loads(self._process.stdout.readline())
        return heard

"""The processes of ranks that this process has started, spare ones included."""

from __future__ import annotations

import psutil


def rank_processes() -> list[psutil.Process]:
    """Return the processes of ranks and of spares."""
    return [one for one, _ in _with_command_lines()]


def serving_processes() -> list[psutil.Process]:
    """Return the processes that run steps, oldest first; the others are spares."""
    found = [one for one, line in _with_command_lines() if "serve_controller" in line]
    return sorted(found, key=psutil.Process.create_time)


def _with_command_lines() -> list[tuple[psutil.Process, str]]:
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "GpuWorker" in line:
            found.append((process, line))
    return found

"""The processes of a Ray cluster that this process started.

Some of them, such as Ray's agents, keep running after GCS or the raylet has failed.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray._private import ray_constants
from ray._private.authentication.authentication_utils import is_token_auth_enabled
from ray._raylet import (  # type: ignore[attr-defined]  # a module in C
    AuthenticationTokenLoader,
    Config,
)

from pagedray.errors import StartupError
from pagedray.machine import kill_process, start_ticks, stop_process

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "RECONNECT_VARIABLE",
    "RayEnvironment",
    "kill_child_processes",
    "kill_processes",
    "kill_ray_processes",
    "ray_processes",
    "warn_if_unauthenticated",
]

logger = logging.getLogger(__name__)

_PROC = Path("/proc")
_SESSION = re.compile(r"/session_[^/]*_(\d+)/")
"""A folder of Ray, named after the process that started it."""
_TITLE = b"ray::"
"""How the command line of a process of Ray may begin once it runs."""
_FORKING = threading.RLock()
"""Held by a thread from before it forks until its child is known to the system."""
_FORK_S = 5.0
"""How long an exit waits for a thread that forks, in seconds."""
os.register_at_fork(
    before=_FORKING.acquire, after_in_parent=_FORKING.release, after_in_child=_FORKING.release
)

RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_MODE = "RAY_AUTH_MODE"
_TOKEN = "RAY_AUTH_TOKEN"
_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@dataclass(frozen=True, slots=True)
class RayProcess:
    """A process, identified by its id and its start time, since the system reuses ids."""

    pid: int
    start_ticks: int


def ray_processes() -> frozenset[RayProcess]:
    """Return the daemons of Ray that this process has started, and all their descendants.

    Includes processes with an ended parent: an agent that waits for a GCS that has ended does not
    notice.
    """
    return _found(_ray_children(), _pass)


def kill_processes(processes: frozenset[RayProcess]) -> None:
    """Kill the processes that still run."""
    for process in processes:
        with suppress(OSError):
            kill_process(process.pid, process.start_ticks)


def kill_ray_processes() -> None:
    """Kill all `ray_processes`, also if they start other processes meanwhile.

    Each process is stopped before its children are looked up: a later child would not be found
    among the descendants of this process once its parent has been killed.
    """
    kill_processes(_found(_ray_children(), _stop))


def kill_child_processes() -> None:
    """Kill all child processes, their descendants and all processes of Ray.

    This process must exit at once: from now on, threads that start a process of Ray wait forever.
    A child that has not executed its program yet does not look like a process of Ray.
    """
    # Never released. A thread that has begun to fork finishes first, so that its child is found.
    _FORKING.acquire(timeout=_FORK_S)
    kill_processes(_found(_children("self"), _stop))


def _ray_children() -> list[int]:
    return [pid for pid in _children("self") if _is_of_ray(pid)]


def _found(children: list[int], visit: Callable[[RayProcess], object]) -> frozenset[RayProcess]:
    """Return these children, orphans of Ray, and the descendants of both.

    `visit` each process before its children are looked up.
    """
    found: set[RayProcess] = set()
    waiting = children + _orphans()
    while waiting:
        pid = waiting.pop()
        process = _identified(pid)
        if process is not None and process not in found:
            found.add(process)
            visit(process)
            waiting += _children(str(pid))
    return frozenset(found)


def _pass(process: RayProcess) -> None:
    pass


def _stop(process: RayProcess) -> None:
    with suppress(OSError):
        stop_process(process.pid, process.start_ticks)


def _identified(pid: int) -> RayProcess | None:
    try:
        return RayProcess(pid, start_ticks(pid))
    except OSError:
        return None


def _children(pid: str) -> list[int]:
    found: list[int] = []
    for children in (_PROC / pid / "task").glob("*/children"):
        with suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def _orphans() -> list[int]:
    """Return processes of Ray that write to a log of a Ray that this process started."""
    started = start_ticks(os.getpid())
    found: list[int] = []
    for folder in _PROC.glob("[0-9]*"):
        pid = int(folder.name)
        with suppress(OSError):
            # An earlier process may have had the same id.
            if _is_of_ray(pid) and start_ticks(pid) >= started and _writes_to_our_log(pid):
                found.append(pid)
    return found


def _writes_to_our_log(pid: int) -> bool:
    for link in (_PROC / str(pid) / "fd").iterdir():
        with suppress(OSError):
            session = _SESSION.search(str(link.readlink()))
            if session is None or int(session[1]) != os.getpid():
                continue
            if link.lstat().st_mode & stat.S_IWUSR:
                return True
    return False


def _is_of_ray(pid: int) -> bool:
    line = b""
    with suppress(OSError):
        line = (_PROC / str(pid) / "cmdline").read_bytes()
    return line.startswith(_TITLE) or str(Path(ray.__file__).parent).encode() in line


class RayEnvironment:
    """Variables in the environment of this process until `close`."""

    def __init__(self, *, allow_unauthenticated: bool, reconnect_s: int) -> None:
        """Provide a token unless the operator has.

        Ray's processes continue for `reconnect_s` without GCS. Raises StartupError if the operator
        has turned tokens off.
        """
        names = (_MODE, _TOKEN, _CLUSTER, RECONNECT_VARIABLE)
        self._before = {name: os.environ.get(name) for name in names}
        self._was_cluster = ray_constants.ENABLE_RAY_CLUSTER
        mode = self._before[_MODE] or "token"
        if mode.lower() != "token" and not allow_unauthenticated:
            raise StartupError(
                f"{_MODE}={mode} would let every user of this machine run code through Ray; unset "
                "it, or use --allow-unauthenticated-ray."
            )
        # Ray lowers the priority of its workers by default.
        os.environ.setdefault("RAY_worker_niceness", "0")
        os.environ[RECONNECT_VARIABLE] = str(reconnect_s)
        # Otherwise Ray replaces the address of the loopback by that of another interface.
        os.environ[_CLUSTER] = "0"
        ray_constants.ENABLE_RAY_CLUSTER = False
        if mode.lower() == "token":
            os.environ[_MODE] = "token"
            loader = AuthenticationTokenLoader.instance()
            if not loader.has_token(ignore_auth_mode=True):
                # Ray would write a token to the home directory.
                os.environ[_TOKEN] = secrets.token_hex(32)
        _read_environment()

    def close(self) -> None:
        """Restore the environment, in which a later Ray may have another token."""
        for name, value in self._before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        ray_constants.ENABLE_RAY_CLUSTER = self._was_cluster
        _read_environment()


def warn_if_unauthenticated() -> None:
    """Log a warning if the Ray to which this process is connected requires no token."""
    if not is_token_auth_enabled():
        logger.warning(
            "The Ray cluster does not require a token: anyone who can reach its ports can run code "
            "as its user; see docs/security.md."
        )


def _read_environment() -> None:
    """Let Ray read the environment again."""
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")

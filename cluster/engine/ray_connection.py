"""The connection of this process to Ray: it joins a cluster, or starts and stops its own."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import ray
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.node import Node
from ray._private.utils import read_ray_address
from ray.exceptions import RpcError

from cluster.engine.ray_health import RayHealth, start_call
from cluster.engine.ray_processes import (
    RECONNECT_VARIABLE,
    RayEnvironment,
    kill_processes,
    kill_ray_processes,
    ray_processes,
    warn_if_unauthenticated,
)
from pagedray.errors import DeviceError, StartupError
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.engine.executor import ReportProgress
    from pagedray.config import EngineConfig

__all__ = ["RayConnection"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
"""How long Ray may take to stop its processes; on a busy machine it takes seconds."""
_RECONNECT_S = 90_000
"""Longer than any drain; a GCS that was started here and has ended does not return."""
_NUM_BYTES = 16 * 2**20

_RECONNECT = RECONNECT_VARIABLE.removeprefix("RAY_")
_DEFAULT_RECONNECT_S = 60.0
_STARTS_WORKERS_AHEAD = "prestart_worker_first_driver"
"""Whether Ray starts a worker for each CPU at once. Ranks need one each; the others would take
memory for as long as Ray runs, and cores while the ranks start."""
_TIMEOUTS = ("timed out", "failed to connect to gcs")
"""Parts of messages of Ray, in lower case, if one of its processes did not start in time."""
_LITTLE_SPACE_BYTES = 64 * 2**20
_SIGACTION_BYTES = 512
"""More than `struct sigaction` has on any platform."""
_REGISTRATION_POLL_S = 0.01
_REGISTRATION_TIMEOUT_S = 10.0
"""Afterwards, Ray waits, and reports the problem."""
_AGENT_PROGRAM = str(Path(__file__).with_name("ray_agent.py"))


class RayConnection:
    """A connection to Ray, until `close`."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        """Connect to the running Ray cluster, or start a cluster. Raises StartupError."""
        self._environment: RayEnvironment | None = None
        if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
            self._start_ray(config, report_progress)
        else:
            self._join_cluster(config, report_progress)
        owns_ray = self._environment is not None
        # They are no longer descendants of this process once their raylet has ended.
        self._processes = ray_processes() if owns_ray else frozenset()
        self.health = RayHealth(reconnect_s=reconnect_s(), can_return=not owns_ray)
        warn_if_unauthenticated()
        self.disk_reserve = DiskReserve(ray_folder())

    def close(self) -> None:
        """Stop Ray if it was started here. May be called twice."""
        self.health.close()
        self.disk_reserve.close()
        if self._environment is not None:
            if self.health.outage is not None:
                # Ray cannot end them.
                self._kill_processes()
            stopping = start_call(ray.shutdown)
            if not wait((stopping,), _STOP_TIMEOUT_S).done:
                # One of them hangs.
                self._kill_processes()
            stopping.result()
            self._environment.close()
        self._environment = None

    def _kill_processes(self) -> None:
        kill_ray_processes()
        kill_processes(self._processes)

    def _join_cluster(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        _check_is_direct()
        if not ray.is_initialized():
            report_progress("Connecting to the Ray cluster", 0.0)
            _check_answers(os.environ["RAY_ADDRESS"])
            join_ray()
        resource = "GPU" if config.parallel.device == "cuda" else "CPU"
        _check_devices(config, int(ray.cluster_resources().get(resource, 0)), "the Ray cluster")

    def _start_ray(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        on_gpu = config.parallel.device == "cuda"
        num_devices = _num_gpus() if on_gpu else len(os.sched_getaffinity(0))
        _check_devices(config, num_devices, "this machine")
        report_progress("Starting Ray", 0.0)
        environment = RayEnvironment(
            allow_unauthenticated=config.parallel.allow_unauthenticated_ray,
            reconnect_s=_RECONNECT_S,
        )
        try:
            start_ray(num_cpus=max(config.parallel.tensor_parallel_size, os.cpu_count() or 1))
        except BaseException:
            environment.close()
            raise
        self._environment = environment


def _check_is_direct() -> None:
    """Raise StartupError for Ray Client: its programs are not part of the cluster."""
    is_client = os.environ.get("RAY_ADDRESS", "").startswith("ray://")
    if is_client or ray.util.client.ray.is_connected():
        raise StartupError(
            "Ray Client (ray://HOST:PORT) cannot start ranks; run on a node of the cluster, with "
            "RAY_ADDRESS=auto or HOST:PORT."
        )


def _check_answers(address: str) -> None:
    """Raise DeviceError if nothing listens at HOST:PORT; Ray would wait for minutes.

    For `auto`, that is the cluster that was last started on this machine.
    """
    found = (read_ray_address() or "") if address == "auto" else address
    host, _, port = found.rpartition(":")
    if not host or "/" in found or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        shown = address if found == address else f"{address} ({found})"
        raise DeviceError(f"No Ray cluster responds at RAY_ADDRESS {shown}: {error}.") from error


def _check_devices(config: EngineConfig, num_devices: int, whose: str) -> None:
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks > num_devices:
        what = "GPU" if config.parallel.device == "cuda" else "CPU core"
        if num_ranks > 1:
            what += "s"
        raise DeviceError(
            f"tensor_parallel_size {num_ranks} needs {num_ranks} {what}, but {whose} has "
            f"{num_devices}."
        )


def _num_gpus() -> int:
    """Return the number of GPUs that Ray will find; importing torch would take seconds."""
    number = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    visible = NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids()
    return number if visible is None else min(number, len(visible))


class DiskReserve:
    """An unnamed file that takes 16 MiB, which is more than the logs of starting ranks.

    A process that Ray starts exits if it cannot write its log.
    """

    def __init__(self, folder: Path) -> None:
        """Reserve space on the disk of `folder`, as far as there is any."""
        self._file: IO[bytes] | None = None
        with suppress(OSError):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # open until `close`
        self._fill()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Give the space back for a while."""
        if self._file is not None:
            with suppress(OSError):
                self._file.truncate(0)
        try:
            yield
        finally:
            self._fill()

    def close(self) -> None:
        """Give the space back. May be called twice."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _fill(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                os.posix_fallocate(self._file.fileno(), 0, _NUM_BYTES)


def start_ray(*, num_cpus: int) -> None:
    """Start Ray within a `RayEnvironment`, in a second attempt if the first takes too long.

    Raises StartupError.
    """
    for is_last in (False, True):
        try:
            with small_nodes():
                _init_ray(
                    # Never an existing cluster, which only RAY_ADDRESS selects.
                    address="local",
                    num_cpus=num_cpus,
                    include_dashboard=False,
                    # With this address, Ray listens on the loopback interface alone.
                    _node_ip_address=LOOPBACK,
                    # This process has read its environment before.
                    _system_config={_RECONNECT: int(reconnect_s()), _STARTS_WORKERS_AHEAD: False},
                )
            _restore_excepthook()
            return
        # Ray raises all kinds: of the disk, of its processes, of time limits.
        except Exception as error:
            # Ray leaves processes running that it started before it failed.
            kill_ray_processes()
            ray.shutdown()
            if is_last or not _is_timeout(error):
                raise StartupError(f"Could not start Ray: {_report(error)}") from error
            # A busy machine may take longer than the time limits of Ray.
            logger.warning("Starting Ray again: %s", _report(error))


def join_ray() -> None:
    """Join the cluster at RAY_ADDRESS. Raises StartupError."""
    try:
        _init_ray()
    except Exception as error:
        report = _report(error)
        raise StartupError(f"Could not join the cluster at RAY_ADDRESS: {report}") from error


def reconnect_s() -> float:
    """Return how long this process continues without GCS before Ray ends it."""
    return float(os.environ.get(RECONNECT_VARIABLE, _DEFAULT_RECONNECT_S))


def ray_folder() -> Path:
    """Return the folder in which Ray writes."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def _init_ray(**options: Any) -> None:  # Any: the options of `ray.init`
    with kept_sigterm_handler():
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)


def _restore_excepthook() -> None:
    """Undo Ray's handling of an exception that ends this process.

    Printing it first would block on a dead GCS.
    """
    worker = ray._private.worker
    if sys.excepthook is worker.custom_excepthook:
        sys.excepthook = worker.normal_excepthook


def _report(error: Exception) -> str:
    """Return Ray's report, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else type(error).__name__
    return f"{text}.{_disk_hint(error)}{_logs_hint(error)}"


def _disk_hint(error: Exception) -> str:
    """Return a sentence about the folder in which Ray writes, if that may be the cause."""
    folder = ray_folder()
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = 0
    is_of_file = isinstance(error, OSError) and error.filename is not None
    if not is_of_file and free >= _LITTLE_SPACE_BYTES:
        return ""
    space = f"{free >> 20} MiB free"
    return f" Ray writes to {folder}, with {space}; RAY_TMPDIR selects another folder."


def _is_timeout(error: Exception) -> bool:
    message = str(error).lower()
    return any(part in message for part in _TIMEOUTS)


def _logs_hint(error: Exception) -> str:
    """Return a sentence about the logs of a Ray that did not start in time, which say why."""
    if not _is_timeout(error):
        return ""
    # The name of a session ends with the process that started it; the newest is the last by name.
    sessions = sorted((ray_folder() / "ray").glob(f"session_*_{os.getpid()}"))
    return f" Ray's logs are in {sessions[-1] / 'logs'}." if sessions else ""


@contextmanager
def kept_sigterm_handler() -> Iterator[None]:
    """Undo the effect of native code inside the block on SIGTERM; keep Python's handlers.

    Ray's core worker installs Abseil's failure signal handler. For SIGTERM, it prints a stack trace
    and starts an alarm that aborts the process after 3 s, and then calls the handler before it: no
    process could take longer than that to stop.
    """
    library = ctypes.CDLL(None)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    library.sigaction(signal.SIGTERM, None, before)
    try:
        yield
    finally:
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is threading.main_thread() and handler is not None:
            # Ray may have set a handler in Python too, which stays.
            signal.signal(signal.SIGTERM, handler)
        else:
            library.sigaction(signal.SIGTERM, before, None)


class SmallNode(Node):
    """Runs GCS, the raylet and its agents, and no other process of Ray's own."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start nothing: no dashboard, no usage statistics."""

    def start_monitor(self) -> None:
        """Start nothing: no nodes are added to this node."""

    def start_log_monitor(self) -> None:
        """Start nothing: the logs of ranks stay in their files."""

    def start_ray_processes(self) -> None:
        """Start the raylet, and wait until GCS knows it, which Ray looks up only once a second."""
        super().start_ray_processes()  # type: ignore[no-untyped-call]  # Ray has few types
        deadline_s = time.monotonic() + _REGISTRATION_TIMEOUT_S
        while time.monotonic() < deadline_s and not self._is_registered():
            time.sleep(_REGISTRATION_POLL_S)

    def _is_registered(self) -> bool:
        try:
            client = self.get_gcs_client()  # type: ignore[no-untyped-call]  # as above
            nodes = client.get_all_node_info(timeout=_REGISTRATION_TIMEOUT_S)
        except RpcError:
            return False
        return any(node_id.hex() == self.node_id for node_id in nodes)


@contextmanager
def small_nodes() -> Iterator[None]:
    """Let `ray.init` start a `SmallNode` until the context ends.

    The raylet of the node waits for a dashboard agent. The agent runs as if Ray was installed
    without the dashboard: it imports less, and serves no HTTP. All agents are run by
    `ray_agent.py`.
    """
    node, parts, services = ray._private.node, ray._private.utils, ray._private.services
    dependency_error = parts.get_dashboard_dependency_error
    python_command = services._build_python_executable_command_memory_profileable

    # Any: the arguments of Ray's function.
    def agent_command(*arguments: Any, **options: Any) -> list[str]:
        return [*python_command(*arguments, **options), _AGENT_PROGRAM]

    node.Node = SmallNode  # type: ignore[misc]  # a class is replaced
    parts.get_dashboard_dependency_error = _no_dashboard
    services._build_python_executable_command_memory_profileable = agent_command
    try:
        yield
    finally:
        node.Node = Node  # type: ignore[misc]
        parts.get_dashboard_dependency_error = dependency_error
        services._build_python_executable_command_memory_profileable = python_command


def _no_dashboard() -> ImportError:
    """Return why Ray has no dashboard, in place of `get_dashboard_dependency_error`."""
    return ImportError("The node of this process has no dashboard.")

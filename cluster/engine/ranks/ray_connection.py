"""The connection of this process to Ray: it joins a cluster, or starts one and stops it."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from cluster.engine.ranks.disk_reserve import DiskReserve
from cluster.engine.ranks.ray_health import RayHealth
from cluster.engine.ranks.sigterm_handler import kept_sigterm_handler
from pagedray.errors import DeviceError, StartupError

if TYPE_CHECKING:
    from cluster.engine.executor import ReportProgress
    from pagedray.config import EngineConfig

__all__ = ["RayConnection"]

_CONNECT_TIMEOUT_S = 10.0
_RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
_LITTLE_SPACE_BYTES = 64 * 2**20


class RayConnection:
    """Ray, until `close`."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        """Connect to the running Ray cluster, or start one. Raises StartupError."""
        self._owns_ray = False
        if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
            self._start_ray(config, report_progress)
        else:
            self._join_cluster(config, report_progress)
        reconnect_s = float(os.environ.get(_RECONNECT_VARIABLE, 60.0))
        self.health = RayHealth(reconnect_s=reconnect_s, can_return=not self._owns_ray)
        self.disk_reserve = DiskReserve(_folder())

    def close(self) -> None:
        """Stop Ray if it was started here. May be called twice."""
        self.health.close()
        self.disk_reserve.close()
        if self._owns_ray:
            ray.shutdown()
        self._owns_ray = False

    def _join_cluster(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        if not ray.is_initialized():
            report_progress("Connecting to the Ray cluster", 0.0)
            _check_answers(os.environ["RAY_ADDRESS"])
            _init_ray("join the cluster at RAY_ADDRESS")
        resource = "GPU" if config.parallel.device == "cuda" else "CPU"
        _check_devices(config, int(ray.cluster_resources().get(resource, 0)), "the Ray cluster")

    def _start_ray(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        on_gpu = config.parallel.device == "cuda"
        num_devices = _num_gpus() if on_gpu else len(os.sched_getaffinity(0))
        _check_devices(config, num_devices, "this machine")
        report_progress("Starting Ray", 0.0)
        # Ray lowers the priority of its workers by default.
        os.environ.setdefault("RAY_worker_niceness", "0")
        _init_ray(
            "start Ray",
            # Never an existing cluster, which only RAY_ADDRESS selects.
            address="local",
            num_cpus=max(config.parallel.tensor_parallel_size, os.cpu_count() or 1),
            include_dashboard=False,
        )
        self._owns_ray = True


def _init_ray(what: str, **options: Any) -> None:  # Any: the options of `ray.init`
    """Initialize Ray. Raises StartupError with what Ray reports, in one line."""
    try:
        with kept_sigterm_handler():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        # Ray raises all kinds: of the disk, of its processes, of time limits.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        report = lines[0].rstrip(".") if lines else type(error).__name__
        raise StartupError(f"Could not {what}: {report}.{_disk_hint(error)}") from error


def _check_answers(address: str) -> None:
    """Raise DeviceError if nothing listens at HOST:PORT; Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise DeviceError(f"No Ray cluster answers at RAY_ADDRESS {address}: {error}.") from error


def _folder() -> Path:
    """Return the folder in which Ray writes."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp")


def _disk_hint(error: Exception) -> str:
    """Return a sentence about the folder in which Ray writes, if that may be the cause."""
    try:
        free = shutil.disk_usage(_folder()).free
    except OSError:
        free = 0
    is_of_file = isinstance(error, OSError) and error.filename is not None
    if not is_of_file and free >= _LITTLE_SPACE_BYTES:
        return ""
    space = f"{free >> 20} MiB free"
    return f" Ray writes to {_folder()}, with {space}; RAY_TMPDIR selects another folder."


def _check_devices(config: EngineConfig, num_devices: int, whose: str) -> None:
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks > num_devices:
        what = "GPUs" if config.parallel.device == "cuda" else "CPU cores"
        raise DeviceError(
            f"tensor_parallel_size {num_ranks} needs {num_ranks} {what}, but {whose} has "
            f"{num_devices}."
        )


def _num_gpus() -> int:
    # torch is imported only if GPUs are used.
    import torch

    return torch.cuda.device_count()

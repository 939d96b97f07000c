"""The connection of this process to Ray: it joins a cluster, or starts and stops its own."""

from __future__ import annotations

import os
import socket
import tempfile
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

import ray
from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager
from ray._private.utils import read_ray_address

from cluster.engine.ray_cluster.ray_calls import start_call
from cluster.engine.ray_cluster.ray_environment import RayEnvironment, warn_if_unauthenticated
from cluster.engine.ray_cluster.ray_health import RayHealth
from cluster.engine.ray_cluster.ray_processes import (
    kill_processes,
    kill_ray_processes,
    ray_processes,
)
from cluster.engine.ray_cluster.ray_start import join_ray, ray_folder, reconnect_s, start_ray
from pagedray.errors import DeviceError, StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cluster.engine.executor import ReportProgress
    from pagedray.config import EngineConfig

__all__ = ["RayConnection"]

_CONNECT_TIMEOUT_S = 10.0
_STOP_TIMEOUT_S = 10.0
"""How long Ray may take to stop its processes; on a busy machine it takes seconds."""
_RECONNECT_S = 90_000
"""Longer than any drain; a GCS that was started here and has ended does not return."""

_NUM_BYTES = 16 * 2**20


class RayConnection:
    """A connection to Ray, until `close`."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        """Connect to the running Ray cluster, or start a cluster.

        Raises StartupError.
        """
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

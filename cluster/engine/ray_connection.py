"""The connection of this process to Ray: it joins a cluster, or starts one and stops it."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import ray

from cluster.engine.sigterm_handler import kept_sigterm_handler
from pagedray.errors import DeviceError

if TYPE_CHECKING:
    from cluster.engine.executor import ReportProgress
    from pagedray.config import EngineConfig

__all__ = ["RayConnection"]


class RayConnection:
    """Ray, until `close`."""

    def __init__(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        """Connect to the running Ray cluster, or start one. Raises StartupError."""
        self._owns_ray = False
        if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
            self._start_ray(config, report_progress)
            return
        if not ray.is_initialized():
            report_progress("Connecting to the Ray cluster", 0.0)
            with kept_sigterm_handler():
                ray.init(log_to_driver=False, logging_level=logging.ERROR)
        resource = "GPU" if config.parallel.device == "cuda" else "CPU"
        _check_devices(config, int(ray.cluster_resources().get(resource, 0)), "the Ray cluster")

    def close(self) -> None:
        """Stop Ray if it was started here. May be called twice."""
        if self._owns_ray:
            ray.shutdown()
        self._owns_ray = False

    def _start_ray(self, config: EngineConfig, report_progress: ReportProgress) -> None:
        on_gpu = config.parallel.device == "cuda"
        num_devices = _num_gpus() if on_gpu else len(os.sched_getaffinity(0))
        _check_devices(config, num_devices, "this machine")
        report_progress("Starting Ray", 0.0)
        # Ray lowers the priority of its workers by default.
        os.environ.setdefault("RAY_worker_niceness", "0")
        with kept_sigterm_handler():
            ray.init(
                # Never an existing cluster, which only RAY_ADDRESS selects.
                address="local",
                num_cpus=max(config.parallel.tensor_parallel_size, os.cpu_count() or 1),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        self._owns_ray = True


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

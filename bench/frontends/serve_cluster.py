"""PagedRay on a local Ray cluster, with ranks that compute nothing.

Controller, servicer and Serve's proxy are real; a step takes a configured time. `bench.frontends`
starts it and reads its streams.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Self

import psutil
import ray
from ray import serve

from bench.controller import SimulatedRanks
from bench.frontend_server import MODEL, TOKEN
from bench.records.machine import free_port
from cluster.serving.ray_serve.deployment import PagedRay, deployment_options
from cluster.serving.ray_serve.options import read_arguments
from pagedray.batch import StepOutput
from pagedray.config import CacheSize

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from cluster.engine.executor import ReportProgress
    from pagedray.batch import StepPlan
    from pagedray.config import EngineConfig

__all__ = ["ServeCluster"]

_CONTEXT = 1_000_000
_NUM_BLOCKS = 1_000_000


class RepeatingExecutor(SimulatedRanks):
    """Ranks that sample the same token in every step."""

    def __init__(
        self,
        config: EngineConfig,
        report_progress: ReportProgress,
        placement: PlacementGroup | None,
    ) -> None:
        super().__init__()
        # The step time is part of the model's name: Serve starts the executor without arguments.
        self._step_s = float(config.model.name.partition("-")[2])
        self._plans: deque[StepPlan] = deque()

    @property
    def cache_size(self) -> CacheSize:
        return CacheSize(num_blocks=_NUM_BLOCKS, num_cpu_blocks=0, block_bytes=0)

    def submit_plan(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect_output(self) -> StepOutput:
        time.sleep(self._step_s)
        plan = self._plans.popleft()
        self._step = plan.step
        return StepOutput(plan.step, [TOKEN] * plan.num_sampled)

    def restart_ranks(self) -> bool:
        self._plans.clear()
        self._step = -1
        return False

    def close(self) -> None:
        self._plans.clear()


class TimedPagedRay(PagedRay):
    """The deployment over these ranks."""

    @staticmethod
    def make_executor(
        config: EngineConfig, report_progress: ReportProgress, placement: PlacementGroup | None
    ) -> RepeatingExecutor:
        return RepeatingExecutor(config, report_progress, placement)

    async def __init__(self, *arguments: object) -> None:  # type: ignore[misc]  # Serve awaits it
        await super().__init__(*arguments)  # type: ignore[arg-type]  # the stubs are narrower than the library


class ServeCluster:
    """Ray Serve on the loopback interface, as a context manager."""

    def __init__(self) -> None:
        self.http_port, self.grpc_port = free_port(), free_port()
        self._folder = tempfile.TemporaryDirectory()

    def deploy(self, step_s: float) -> str:
        """Run one replica with steps of this duration, replacing any other; return its model."""
        folder = Path(tempfile.mkdtemp(dir=self._folder.name), f"step-{step_s}")
        folder.mkdir()
        for path in MODEL.iterdir():
            (folder / path.name).symlink_to(path)
        config = json.loads((MODEL / "config.json").read_text())
        (folder / "config.json").unlink()
        long = config | {"max_position_embeddings": _CONTEXT}
        (folder / "config.json").write_text(json.dumps(long))
        arguments = read_arguments({"model": str(folder), "device": "cpu", "executor": "local"})
        options = deployment_options(arguments)
        application = serve.deployment(TimedPagedRay, **options).bind(arguments)  # type: ignore[attr-defined]  # Serve's decorator
        serve.run(application, name="default", route_prefix="/")
        return folder.name

    def cpu_s(self) -> float:
        """Return the CPU seconds of the proxy and the replica."""
        total_s = 0.0
        for process in psutil.Process().children(recursive=True):
            title = "".join(process.cmdline()[:1])
            if title.startswith(("ray::ProxyActor", "ray::ServeReplica")):
                times = process.cpu_times()
                total_s += times.user + times.system
        return total_s

    def __enter__(self) -> Self:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init(
            address="local",
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        callback = "cluster.serving.ray_serve.http_proxy:middlewares"
        serve.start(
            http_options={"host": "127.0.0.1", "port": self.http_port},
            grpc_options={
                "port": self.grpc_port,
                "grpc_servicer_functions": ["cluster.serving.ray_serve.grpc_proxy.add_services"],
            },
            controller_options={
                "runtime_env": {"env_vars": {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": callback}}
            },
        )
        return self

    def __exit__(self, *_: object) -> None:
        serve.shutdown()
        ray.shutdown()
        self._folder.cleanup()

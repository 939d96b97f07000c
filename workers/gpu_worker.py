"""The Ray actor around one rank.

Ray places, starts and ends it. Plans arrive over the step channel, which one thread serves until
the controller sends a shutdown or disconnects.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pagedray.batch import Shutdown, StepAck, StepMasks, WorkerFailure
from pagedray.channel import ChannelClosedError, WorkerChannel, connect
from pagedray.errors import StartupError
from workers.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from pagedray.config import CacheSize, EngineConfig
    from workers.worker import PendingStep, Worker

__all__ = ["GpuWorker"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 30.0
_POLL_S = 5e-5
"""Interval of polling for the end of a step while no plan arrives."""


class GpuWorker:
    """One rank as an actor. The executor wraps it with `ray.remote`.

    Errors of configuration are returned as text: Ray would wrap an exception in a traceback.
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._worker: Worker | None = None
        # One thread does all the computing: each thread that computes has an OpenMP team of its
        # own, and two teams would be more threads than cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._progress = (0, 0)
        self._rendezvous: Rendezvous | None = None

    def open_rendezvous(self, host: str) -> tuple[str, int]:
        """Listen on `host`, an address of this node; return the address and port of the group."""
        self._rendezvous = Rendezvous(host)
        return host, self._rendezvous.port

    def load_progress(self) -> tuple[int, int]:
        """Return the number of tensors loaded, and of all tensors."""
        return self._progress

    def start_rank(self, address: tuple[str, int], host: str) -> str | CacheSize:
        """Join the group and load the weights; return its available cache, or an error message.

        `address` is the rendezvous; `host` is the address where other ranks reach this one.
        """
        return self._thread.submit(self._start_rank, address, host).result()

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> dict[str, dict[str, int]]:
        """Allocate both pools; returns what `Worker.allocate_cache` does."""
        assert self._worker is not None
        allocate = self._worker.allocate_cache
        return self._thread.submit(allocate, num_blocks, num_cpu_blocks).result()

    def serve_controller(self, endpoint: str, secret: bytes) -> None:
        """Connect to the controller and run its plans until it shuts down or disconnects."""
        self._thread.submit(self._serve_controller, endpoint, secret).result()

    def _start_rank(self, address: tuple[str, int], host: str) -> str | CacheSize:
        # The process that creates the actor imports no torch.
        import torch

        from workers.parallel.open_group import open_group
        from workers.worker_factory import make_worker

        try:
            group = open_group(
                self._rank,
                self._config.parallel.tensor_parallel_size,
                device=torch.device(self._config.parallel.device),
                address=address,
                host=host,
                rendezvous=self._rendezvous,
            )
            self._worker = make_worker(self._config, group)
            self._worker.load_weights(self._report)
            return self._worker.available_cache()
        except StartupError as error:
            return str(error)

    def _serve_controller(self, endpoint: str, secret: bytes) -> None:
        assert self._worker is not None
        channel = connect(endpoint, self._rank, secret, _CONNECT_TIMEOUT_S)
        try:
            serve_steps(self._worker, channel, is_first=self._rank == 0)
        except ChannelClosedError:
            logger.warning("Rank %s lost the connection to its controller.", self._rank)
        except Exception:
            channel.send(WorkerFailure(traceback.format_exc(limit=-6)))
            raise
        finally:
            channel.close()
            self._worker.close()

    def _report(self, done: int, total: int) -> None:
        self._progress = (done, total)


def serve_steps(worker: Worker, channel: WorkerChannel, *, is_first: bool) -> None:
    """Run plans in order until a Shutdown arrives.

    A step's output is sent as soon as it is ready; a plan that arrives before is launched behind
    the running step. A step that needs masks gets them before the next plan, and after the outputs
    of all earlier steps are sent, since masks depend on these.
    """
    pending: deque[PendingStep] = deque()

    def send(finished: PendingStep) -> None:
        output = finished.output()
        channel.send(output if is_first else StepAck(output.step))

    while True:
        if pending and (pending[0].is_ready or len(pending) > 1):
            send(pending.popleft())
            continue
        # Waiting for the step alone would launch the next one too late and leave the device idle.
        if pending and not channel.has_message():
            time.sleep(_POLL_S)
            continue
        message = channel.receive()
        if isinstance(message, Shutdown):
            return
        assert not isinstance(message, StepMasks)
        launched = worker.launch(message)
        if launched.needs_masks:
            while pending:
                send(pending.popleft())
            masks = channel.receive()
            if isinstance(masks, Shutdown):
                return
            assert isinstance(masks, StepMasks)
            launched.take_masks(masks)
        pending.append(launched)

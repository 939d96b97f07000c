"""The Ray actor around one rank.

Ray places it, starts it and ends it; steps come over the step channel, which a thread of
its own serves until the controller shuts it down or is gone.
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
from workers.rendezvous import Rendezvous

if TYPE_CHECKING:
    from pagedray.config import EngineConfig
    from workers.worker_kinds import AnyWorker, Pending

__all__ = ["GpuWorker"]

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 30.0
_POLL_S = 5e-5
"""How late a step may be seen to be done while no plan comes."""


class GpuWorker:
    """One rank as an actor. The executor wraps it with `ray.remote`.

    A mistake of the user's is returned as text, not raised: Ray would wrap it in a trace.
    """

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self._config = config
        self._rank = rank
        self._worker: AnyWorker | None = None
        # All of the rank's work is done in one thread: each thread that computes has a team of
        # OpenMP threads, and with two teams there are more than cores and none may spin.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pagedray-rank")
        self._progress = (0, 0)
        self._rendezvous: Rendezvous | None = None

    def open_meeting_point(self, host: str) -> tuple[str, int]:
        """Return an address and a port for the group to meet at; `host` is one of this node's."""
        self._rendezvous = Rendezvous(host)
        return host, self._rendezvous.port

    def progress(self) -> tuple[int, int]:
        """Return (tensors loaded, tensors in all)."""
        return self._progress

    def load(self, address: tuple[str, int], host: str) -> str | tuple[int, int]:
        """Join the group, load the weights; return how many blocks fit, or what is wrong.

        The group meets at `address`; `host` is where its other ranks reach this one.
        """
        return self._thread.submit(self._load, address, host).result()

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> dict[str, dict[str, int]]:
        """Allocate both pools; return how many layers each provider of attention kernels serves."""
        assert self._worker is not None
        allocate = self._worker.allocate_cache
        return self._thread.submit(allocate, num_blocks, num_cpu_blocks).result()

    def run(self, endpoint: str, secret: bytes) -> None:
        """Connect to the controller and serve steps until told to stop or left alone."""
        self._thread.submit(self._run, endpoint, secret).result()

    def _load(self, address: tuple[str, int], host: str) -> str | tuple[int, int]:
        # Torch is loaded where the rank lives, not where the actor is made.
        import torch

        from workers.parallel import open_group
        from workers.worker_kinds import make_worker

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
            self._worker.load(self._report)
            return self._worker.fitting_blocks()
        except StartupError as error:
            return str(error)

    def _run(self, endpoint: str, secret: bytes) -> None:
        assert self._worker is not None
        channel = connect(endpoint, self._rank, secret, _CONNECT_TIMEOUT_S)
        try:
            serve_steps(self._worker, channel, is_first=self._rank == 0)
        except ChannelClosedError:
            logger.warning("Rank %s lost its controller.", self._rank)
        except Exception:
            channel.send(WorkerFailure(traceback.format_exc(limit=-6)))
            raise
        finally:
            channel.close()
            self._worker.close()

    def _report(self, done: int, total: int) -> None:
        self._progress = (done, total)


def serve_steps(worker: AnyWorker, channel: WorkerChannel, *, is_first: bool) -> None:
    """Carry out plans in order until a Shutdown arrives.

    A step's output is sent as soon as it is there; while it is not, the next plan is
    launched behind it, however late it comes. A step that needs masks gets them before the next
    plan, but not before the outputs of all earlier steps are sent: the masks are made of them.
    """
    pending: deque[Pending] = deque()

    def send(finished: Pending) -> None:
        output = finished.output()
        channel.send(output if is_first else StepAck(output.step))

    while True:
        if pending and (pending[0].is_ready or len(pending) > 1):
            send(pending.popleft())
            continue
        # Who waited for the step alone would launch the next one after it, and the device be idle.
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

"""The interface of executors, which run plans on the ranks of one group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.batch import DiskReport, StepMasks, StepOutput, StepPlan
    from pagedray.config import CacheSize, KernelReport
    from pagedray.rank_roofline import RankRoofline

__all__ = ["Executor", "Outage", "RankHealth", "ReportProgress"]

ReportProgress = Callable[[str, float], None]
"""Called with the current activity and its progress, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """The reason why dead ranks cannot be replaced, although steps still run."""

    reason: str
    """The cause, in one sentence."""
    is_final: bool
    """Whether the process has to be restarted."""
    is_ready: bool
    """Whether the server should get new requests meanwhile."""
    drain_s: float
    """How long running requests may take if it is final."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHealth:
    """The findings about the ranks."""

    hang: str = ""
    """Which rank hangs and where it stands; empty if none does."""
    is_replaceable: bool = True
    """Whether calls raise HungRankError meanwhile, so that the ranks can be replaced."""
    is_busy: bool = False
    """Whether a rank has work, other than waiting for masks."""
    num_unpinned: int = 0
    """Blocks of CPU pools that cannot be pinned, of all ranks; 0 while a rank hangs."""
    num_uncaptured: int = 0
    """Sizes of steps without CUDA graphs after failed captures; 0 while a rank hangs."""


class Executor(ABC):
    """A group of ranks. Plans run in the order in which they are submitted."""

    _cache_size: CacheSize
    _kernels: KernelReport

    @property
    def cache_size(self) -> CacheSize:
        """The size of the block pools."""
        return self._cache_size

    @property
    def kernels(self) -> KernelReport:
        """Which kernels compute the model, on every rank."""
        return self._kernels

    @abstractmethod
    def poll_ranks(self) -> tuple[int, Sequence[DiskReport]]:
        """Return the last step that every rank has finished, block copies included.

        Also returns the joined reports of the ranks on their files since the last call. Raises
        WorkerError.
        """

    @property
    def outage(self) -> Outage | None:
        """The reason why ranks cannot be replaced, or None."""
        return None

    @abstractmethod
    def submit_plan(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Raises WorkerError."""

    @abstractmethod
    def send_masks(self, masks: StepMasks) -> None:
        """Send the masks of the last plan to every rank. Raises WorkerError.

        The outputs of all earlier plans must have been collected.
        """

    @abstractmethod
    def collect_output(self) -> StepOutput:
        """Wait for the output of the oldest plan in flight. Raises WorkerError."""

    def measure_rooflines(self) -> list[RankRoofline]:
        """Measure the devices, and return the work of steps on each rank.

        There is nothing to return if the model does not generate. No plan may be in flight. Raises
        WorkerError, and DeviceError if too little memory is free.
        """
        return []

    @abstractmethod
    def observe_ranks(self, now_s: float) -> RankHealth:
        """Return whether the ranks make progress.

        Must be called several times a second, by another thread than the step thread.
        """

    @abstractmethod
    def restart_ranks(self) -> bool:
        """Replace the ranks that have died, or all of them; steps count from 0 again.

        Returns whether every rank has the CPU pool that it had, as it was. Of the device pool
        nothing is kept.

        Raises WorkerError or StartupError.
        """

    @abstractmethod
    def close(self) -> None:
        """End the ranks and release their resources. May be called twice."""

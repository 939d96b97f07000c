"""The interface to the ranks of one group: what the controller sends plans to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagedray.batch import EmbedOutput, EmbedPlan, StepMasks, StepOutput, StepPlan
    from pagedray.config import CacheSize

__all__ = ["Executor", "ReportProgress"]

ReportProgress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""


class Executor(ABC):
    """A group of ranks. Plans are carried out in the order they are submitted."""

    @property
    @abstractmethod
    def cache_size(self) -> CacheSize:
        """Blocks of the pools."""

    @property
    @abstractmethod
    def attention_providers(self) -> dict[str, dict[str, int]]:
        """Layers that each provider of attention kernels serves, by part of a step."""

    @property
    @abstractmethod
    def acknowledged_step(self) -> int:
        """The last step that every rank has finished, its block copies included."""

    @abstractmethod
    def submit_plan(self, plan: StepPlan) -> None:
        """Send a plan to every rank. Raises WorkerError."""

    @abstractmethod
    def send_masks(self, masks: StepMasks) -> None:
        """Send every rank the masks of the last plan, which it samples under. Raises WorkerError.

        The outputs of all plans before it have been collected.
        """

    @abstractmethod
    def collect_output(self) -> StepOutput:
        """Return the output of the oldest plan that has none yet. Raises WorkerError."""

    @abstractmethod
    def embed_texts(self, plan: EmbedPlan) -> EmbedOutput:
        """Return what an encoder makes of texts; not beside other plans. Raises WorkerError."""

    @abstractmethod
    def restart_ranks(self) -> None:
        """Replace every rank by a new one that has no plan; steps count from 0 again.

        Raises WorkerError or StartupError.
        """

    @abstractmethod
    def close(self) -> None:
        """End the ranks and release what they hold. May be called twice."""

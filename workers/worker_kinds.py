"""Which worker runs a model: one that generates, or one that embeds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from workers.embedding_worker import EmbeddingWorker
from workers.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.batch import EmbedOutput, EmbedPlan, StepMasks, StepOutput, StepPlan
    from pagedray.config import EngineConfig
    from workers.parallel import ParallelGroup

__all__ = ["AnyWorker", "Pending", "make_worker"]


class Pending(Protocol):
    """A step that was launched."""

    @property
    def needs_masks(self) -> bool:
        """Whether it waits to be told which tokens it may sample."""

    def take_masks(self, masks: StepMasks) -> None:
        """Sample under the masks that it waits for; not twice."""

    @property
    def is_ready(self) -> bool:
        """Whether `output` returns at once."""

    def output(self) -> StepOutput | EmbedOutput:
        """Return what came of it, waiting for the device."""


class AnyWorker(Protocol):
    """One rank of a group. Call `load`, then `allocate_cache`, then `launch`."""

    def load(self, report_progress: Callable[[int, int], None]) -> None:
        """Fill the weights, telling (tensors done, tensors in all) as it goes."""

    def fitting_blocks(self) -> tuple[int, int]:
        """Return how many blocks the device pool and the CPU pool may have on this rank."""

    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> dict[str, dict[str, int]]:
        """Allocate both pools; steps may be launched from then on.

        Return how many layers each provider of attention kernels serves, by part of a step.
        """

    def launch(self, plan: StepPlan | EmbedPlan) -> Pending:
        """Carry out one plan."""

    def close(self) -> None:
        """Release the device and leave the group."""


def make_worker(config: EngineConfig, group: ParallelGroup) -> AnyWorker:
    """Return the worker of one rank. Raises StartupError."""
    return EmbeddingWorker(config, group) if config.model.is_encoder else Worker(config, group)

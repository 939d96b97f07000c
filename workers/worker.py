"""The interface of a worker, which holds one rank's part of a model and runs its plans.

Whether it runs inside the controller's process or inside a Ray actor is not known here.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import torch

from attention.selector import select_backend
from pagedray.config import LARGE_LIMITS, CacheSize, EngineConfig, KernelReport, StepLimits
from pagedray.errors import DeviceError, StartupError
from pagedray.machine import num_usable_cores
from workers.runner.step_graphs import has_graphs

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionBackend, AttentionSpec
    from pagedray.batch import StepMasks, StepOutput, StepPlan
    from workers.parallel.group import ParallelGroup

__all__ = ["PendingStep", "Worker", "rank_device", "release_gpu_memory"]

_LARGE_GPU_BYTES = 70 * 2**30
"""GPUs of at least this memory have LARGE_LIMITS by default."""


class PendingStep(Protocol):
    """A step that was launched and may still run on the device."""

    @property
    def needs_masks(self) -> bool:
        """Whether the step waits for the masks of the tokens that it may sample."""

    def take_masks(self, masks: StepMasks) -> None:
        """Sample under the masks; must be called once, and only if the step needs masks."""

    @property
    def is_ready(self) -> bool:
        """Whether `output` returns without waiting for the device."""

    @property
    def is_copied(self) -> bool:
        """Whether all copies between the pools have ended, including earlier steps."""

    def output(self) -> StepOutput:
        """Return the result of the step; waits for the device."""


class Worker(ABC):
    """One rank of a group.

    Call `load_weights`, `allocate_cache`, `warm_up` and `capture_graphs`, then `launch`. The other
    ranks take part in `available_cache`, `capture_graphs` and `launch`.
    """

    def __init__(
        self, config: EngineConfig, group: ParallelGroup, device: torch.device | None = None
    ) -> None:
        """Run on `device`, or on the first one of this process.

        Raises DeviceError, and StartupError if no attention backend supports the model.
        """
        self._config = config
        self._group = group
        self._device = device or rank_device(config)
        if self._device.type == "cpu":
            torch.set_num_threads(_num_threads(config))

    @abstractmethod
    def load_weights(self, report_progress: Callable[[int, int], None]) -> dict[str, str]:
        """Load the weights; reports the number of tensors loaded, and of all tensors.

        Returns a digest of each file that has them. Raises CheckpointError.
        """

    @property
    def default_limits(self) -> StepLimits:
        """The limits of a step where no option sets them.

        Larger steps compute more tokens a second, but need more memory.
        """
        if self._config.model.pools or self._device.type == "cpu":
            return StepLimits()
        memory = torch.cuda.get_device_properties(self._device).total_memory
        return LARGE_LIMITS if memory >= _LARGE_GPU_BYTES else StepLimits()

    @abstractmethod
    def available_cache(self, limits: StepLimits) -> CacheSize:
        """Return the size of the pools that fit on this rank, given the largest steps.

        The limits hold for all ranks.
        """

    @abstractmethod
    def allocate_cache(self, num_blocks: int, num_cpu_blocks: int) -> KernelReport:
        """Allocate both pools, and return the report on the attention kernels."""

    @abstractmethod
    def warm_up(self) -> None:
        """Compile the kernels of the first steps, unless they are compiled already."""

    @abstractmethod
    def capture_graphs(self, *, only_largest: bool = False) -> None:
        """Capture CUDA graphs; steps may be launched afterwards.

        All ranks of a group do this at the same time. With `only_largest`, the others are captured
        when a step first needs them or by `use_idle_time`, so that steps begin sooner.
        """

    def use_idle_time(self) -> bool:
        """Capture a missing graph, or pin a part of the CPU pool; return False if nothing is left.

        This takes about 20 ms, in which no step may be launched. Later steps would otherwise be
        slower.
        """
        return False

    @abstractmethod
    def end_epoch(self) -> None:
        """Drop all but the weights, and leave the group, of which other ranks are gone.

        Call `allocate_cache` again after it. Raises RuntimeError if the device has failed.
        """

    @abstractmethod
    def launch(self, plan: StepPlan) -> PendingStep:
        """Launch the step of a plan; on a GPU, return before its kernels have run."""

    @abstractmethod
    def close(self) -> None:
        """Release the device and leave the group."""

    def _select_backend(self, spec: AttentionSpec) -> type[AttentionBackend]:
        try:
            return select_backend(self._config.attention_backend, spec)
        except ValueError as error:
            raise StartupError(str(error)) from error


def release_gpu_memory() -> None:
    """Return unused memory to the GPU."""
    # Captured graphs hold memory and the collectives of the group, so free graphs in cycles, too.
    gc.collect()
    # cuBLAS keeps 32 MiB for each stream that it was used on, and graphs are captured on others.
    # The graphs of another engine of this process still use this memory.
    if not has_graphs():
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


def rank_device(config: EngineConfig, index: int = 0) -> torch.device:
    """Return the device of a rank, by its place among the devices that its process sees.

    Raises DeviceError.
    """
    if config.parallel.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise DeviceError("CUDA is not available on this machine; use --device cpu.")
    return torch.device("cuda", index)


def _num_threads(config: EngineConfig) -> int:
    if config.parallel.num_threads is not None:
        return config.parallel.num_threads
    return max(1, num_usable_cores() // config.parallel.tensor_parallel_size)

"""A step that was launched: its tokens, masks and copies.

It does not know how tokens are sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from pagedray.batch import StepMasks, StepOutput
from workers.device_event import DeviceEvent, record_event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.runner.block_swaps import BlockSwaps, SwapFence
    from workers.sampler import Sampled
    from workers.sampling.logprobs import PromptReport

__all__ = ["LastStep", "PendingTokens", "Sample"]

Sample: TypeAlias = "Callable[[StepMasks | None], Sampled]"
"""Samples the tokens of a step, given its masks if it needs some."""


class LastStep:
    """The end of the latest step of a rank."""

    def __init__(self) -> None:
        self.done: DeviceEvent | None = None
        """None before the first step has ended."""


class PendingTokens:
    """A step that was launched; the device may still compute its tokens.

    A step that needs masks samples its tokens once it has them.
    """

    def __init__(
        self,
        step: int,
        sample: Sample | None,
        *,
        needs_masks: bool,
        started: DeviceEvent,
        last_step: LastStep,
        swaps: BlockSwaps,
        fence: SwapFence,
        device: torch.device,
        prompt_reports: Sequence[PromptReport] = (),
    ) -> None:
        """`sample` takes the masks; the `fence` is of the `swaps` up to this step."""
        self._prompt_reports = prompt_reports
        self.step = step
        self.needs_masks = needs_masks
        self._sample = sample
        self._sampled: Sampled | None = None
        self._started = started
        self._last_step = last_step
        self._last_done = last_step.done
        self._swaps = swaps
        self._fence = fence
        self._device = device
        self._done: DeviceEvent | None = None
        if not needs_masks:
            self._finish(None)

    def take_masks(self, masks: StepMasks) -> None:
        assert self.needs_masks
        assert masks.step == self.step
        self.needs_masks = False
        self._finish(masks)

    @property
    def is_ready(self) -> bool:
        return self._done is not None and self._done.query()

    @property
    def is_copied(self) -> bool:
        """Whether the pool copies of this step and of earlier steps have ended."""
        return self._fence.is_reached

    def sampled(self) -> Sampled:
        """Return the sampled tokens, of which there must be some; waits for the device."""
        assert self._done is not None
        assert self._sampled is not None
        self._done.synchronize()
        return self._sampled

    def output(self) -> StepOutput:
        """Return the sampled tokens and timings; waits for the device, not for masks or copies."""
        assert self._done is not None
        self._done.synchronize()
        sampled = self._sampled
        num_swapped, swap_s = self._swaps.take_measurement()
        return StepOutput(
            step=self.step,
            token_ids=[] if sampled is None else sampled.token_ids.tolist(),
            logprobs=[] if sampled is None else sampled.logprobs,
            forward_s=self._started.elapsed_time(self._done) / 1e3,
            swap_s=swap_s,
            prompt_logprobs=[report.as_message() for report in self._prompt_reports],
            num_swapped=num_swapped,
            is_acknowledged=self.is_copied,
            draft_ids=_packed(None if sampled is None else sampled.draft_ids),
            idle_s=self._idle_s,
        )

    @torch.inference_mode()
    def _finish(self, masks: StepMasks | None) -> None:
        if self._sample is not None:
            # The tokens are on the host before the step's event.
            self._sampled = self._sample(masks)
            self._sample = None
        self._done = self._last_step.done = record_event(self._device)

    @property
    def _idle_s(self) -> float:
        last_done = self._last_done
        return 0.0 if last_done is None else last_done.elapsed_time(self._started) / 1e3


def _packed(draft_ids: torch.Tensor | None) -> bytes:
    return b"" if draft_ids is None else draft_ids.numpy().astype(np.int32).tobytes()

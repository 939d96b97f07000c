"""From a plan to sampled tokens: input batch, forward pass, logits, sampler.

The runner carries plans out in order and knows nothing of requests or of other ranks
beyond the collectives inside the model.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pagedray.batch import StepOutput, StepPlan
from workers.sampler import Sampled, Sampler

if TYPE_CHECKING:
    from attention.abstract import AttentionMetadataBuilder
    from workers.input_batch import InputBatch, StepInputs
    from workers.kv_cache import KVCache
    from workers.models.decoder import Decoder

__all__ = ["ModelRunner", "PendingStep"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingStep:
    """A step that was launched; its tokens may still be in the making on the device."""

    step: int
    sampled: Sampled | None
    """Its tokens lie on the host, and are there once the step is done."""
    done: torch.cuda.Event | None
    started_s: float

    @property
    def is_ready(self) -> bool:
        """Whether `output` returns at once."""
        return self.done is None or self.done.query()

    def output(self) -> StepOutput:
        """Return what was sampled, waiting for the device."""
        if self.done is not None:
            self.done.synchronize()
        tokens = [] if self.sampled is None else self.sampled.token_ids.tolist()
        return StepOutput(
            step=self.step,
            token_ids=tokens,
            logprobs=[] if self.sampled is None else self.sampled.logprobs,
            forward_s=time.perf_counter() - self.started_s,
        )


class ModelRunner:
    """Runs the steps of one rank."""

    def __init__(
        self,
        *,
        model: Decoder,
        cache: KVCache,
        builder: AttentionMetadataBuilder,
        batch: InputBatch,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._cache = cache
        self._builder = builder
        self._batch = batch
        self._sampler = sampler

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Carry a plan out; on a GPU, return before its kernels have run."""
        started_s = time.perf_counter()
        for start in plan.starts:
            self._sampler.start(start)
        self._batch.apply(plan)
        self._cache.swap_out(plan.swap_outs)
        self._cache.swap_in(plan.swap_ins)
        self._cache.copy(plan.copies)
        sampled = self._run(plan) if plan.sequences else None
        return PendingStep(
            step=plan.step, sampled=sampled, done=self._recorded(), started_s=started_s
        )

    def _run(self, plan: StepPlan) -> Sampled | None:
        inputs = self._batch.inputs(plan.sequences)
        hidden = self._model.forward(
            inputs.token_ids,
            inputs.positions,
            self._cache.device_pool,
            self._builder.build(inputs.attention),
            inputs.sampled,
        )
        return self._sample(inputs, hidden) if inputs.sampled_rows else None

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor) -> Sampled:
        sampled = self._sampler.sample(
            self._model.logits(hidden), inputs.sampled_rows, inputs.sampled_positions
        )
        self._batch.append_sampled(inputs, sampled.token_ids)
        # Asked for later, they would come behind the next step. The copy goes to pinned memory.
        return replace(sampled, token_ids=sampled.token_ids.to("cpu", non_blocking=True))

    def _recorded(self) -> torch.cuda.Event | None:
        if self._cache.device_pool.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

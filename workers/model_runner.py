"""From a plan to sampled tokens: input batch, forward pass, logits, sampler.

The runner carries plans out in order and knows nothing of requests or of other ranks
beyond the collectives inside the model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pagedray.batch import StepOutput, StepPlan
from workers.moment import Moment, mark_moment
from workers.sampler import Sampled, Sampler

if TYPE_CHECKING:
    from attention.abstract import AttentionMetadataBuilder, AttentionState
    from workers.cuda_graphs import DecodeGraphs
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
    started: Moment
    swapped: Moment
    """After the copies between the pools."""
    done: Moment

    @property
    def is_ready(self) -> bool:
        """Whether `output` returns at once."""
        return self.done.query()

    def output(self) -> StepOutput:
        """Return what was sampled, waiting for the device."""
        self.done.synchronize()
        tokens = [] if self.sampled is None else self.sampled.token_ids.tolist()
        return StepOutput(
            step=self.step,
            token_ids=tokens,
            logprobs=[] if self.sampled is None else self.sampled.logprobs,
            forward_s=self.swapped.elapsed_time(self.done) / 1e3,
            swap_s=self.started.elapsed_time(self.swapped) / 1e3,
        )


class ModelRunner:
    """Runs the steps of one rank."""

    def __init__(
        self,
        *,
        model: Decoder,
        cache: KVCache,
        builder: AttentionMetadataBuilder,
        state: AttentionState,
        batch: InputBatch,
        sampler: Sampler,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`graphs` serve the steps that they can; without them every step is eager."""
        self._model = model
        self._cache = cache
        self._builder = builder
        self._state = state
        self._graphs = graphs
        self._batch = batch
        self._sampler = sampler

    @property
    def attention_servers(self) -> dict[str, dict[str, int]]:
        """How many layers whose attention kernels serve, by part of a step and server."""
        return self._builder.servers()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Carry a plan out; on a GPU, return before its kernels have run."""
        for start in plan.starts:
            self._sampler.start(start)
        self._batch.apply(plan)
        device = self._cache.device_pool.device
        started = mark_moment(device)
        self._cache.swap_out(plan.swap_outs)
        self._cache.swap_in(plan.swap_ins)
        swapped = mark_moment(device) if plan.swap_outs or plan.swap_ins else started
        self._cache.copy(plan.copies)
        sampled = self._run(plan) if plan.sequences else None
        return PendingStep(
            step=plan.step,
            sampled=sampled,
            started=started,
            swapped=swapped,
            done=mark_moment(device),
        )

    def _run(self, plan: StepPlan) -> Sampled | None:
        inputs = self._batch.inputs(plan.sequences)
        hidden = self._hidden(inputs)
        return self._sample(inputs, hidden) if inputs.sampled_rows else None

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """Return the normed hidden states of the sampled tokens."""
        metadata = self._builder.build(inputs.attention)
        if self._graphs is not None and self._graphs.serves(inputs):
            return self._graphs.run(inputs, metadata)
        self._state.begin_forward(metadata)
        return self._model.forward(
            inputs.token_ids,
            inputs.positions,
            self._cache.device_pool,
            metadata,
            inputs.sampled,
        )

    def _sample(self, inputs: StepInputs, hidden: torch.Tensor) -> Sampled:
        sampled = self._sampler.sample(
            self._model.logits(hidden), inputs.sampled_rows, inputs.sampled_positions
        )
        self._batch.append_sampled(inputs, sampled.token_ids)
        # Asked for later, they would come behind the next step. The copy goes to pinned memory.
        return replace(sampled, token_ids=sampled.token_ids.to("cpu", non_blocking=True))

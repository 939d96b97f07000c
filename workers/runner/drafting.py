"""Drafts of a draft head or a draft model, behind the sampled tokens of a step.

The drafter reads all tokens of each step, so that the cache has the keys and values of its layers
for all tokens, as for the layers of the target. Drafts then follow the last token of each sequence,
one pass of the drafter after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from workers.models.self_attention import CachedAttention, StepAttention
from workers.sampling.edits import Chains

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionMetadataBuilder
    from attention.layer import Attention
    from workers.models.draft_head import DraftOutputs, RankDrafter
    from workers.models.self_attention import HeadInputs
    from workers.runner.forward_pass import ForwardPass
    from workers.runner.input_batch import InputBatch, StepInputs
    from workers.sampler import Sampler
    from workers.sampling.choice import Draws, IntArray

__all__ = ["Drafting", "HostDrafting", "WriteAttention", "Writer"]

_Draw: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
Writer: TypeAlias = "Callable[[int, torch.Tensor, torch.Tensor], None]"


class Drafting(ABC):
    """Runs a drafter on the tokens of steps."""

    def __init__(
        self,
        drafter: RankDrafter,
        kv_cache: torch.Tensor,
        *,
        forward_pass: ForwardPass,
        batch: InputBatch,
        sampler: Sampler,
        builder: AttentionMetadataBuilder,
    ) -> None:
        """`builder` plans the passes of drafts, and nothing else."""
        self._builder = builder
        self._drafter = drafter
        self._forward_pass = forward_pass
        self._kv_cache = kv_cache
        self._batch = batch
        self._sampler = sampler
        self._choice = sampler.choice
        self._last_position = drafter.layers.max_positions - 1

    def run(
        self,
        inputs: StepInputs,
        token_ids: torch.Tensor | None,
        num_drafts: int,
    ) -> torch.Tensor | None:
        """Read the tokens of a step, and return drafts `[num_sequences, num_drafts]` on the host.

        It is the latest step of the forward pass. `token_ids`, `[num_sampled]`, are the sampled
        tokens, which the rows have. None without drafts, or without sampled tokens. On a GPU, the
        drafts are written when the device has run this, and valid until the next drafts.
        """
        states = self._read(inputs)
        if token_ids is None or not num_drafts:
            return None
        return self._draft(inputs, states, token_ids, num_drafts)

    def warm_up(self) -> None:  # noqa: B027  # Only a GPU compiles kernels.
        """Compile the kernels of drafts of a sequence."""

    def capture_graphs(self, *, only_largest: bool = False) -> None:  # noqa: B027  # As above.
        """Capture all graphs, or only the largest; other steps use it until the next capture."""

    def capture_next(self) -> bool:
        """Capture the smallest of the missing graphs; return False if none is missing."""
        return False

    def _read(self, inputs: StepInputs) -> torch.Tensor | None:
        """Read all tokens of a step; return their states."""
        if not self._drafter.lag:
            self._forward_pass.read(self._drafter, inputs)
            return None
        write = WriteAttention(self._writer(inputs))
        return self._drafter.read(self._batch.next_tokens(inputs), inputs.positions, write)

    @abstractmethod
    def _writer(self, inputs: StepInputs) -> Writer:
        """Return a function that writes the keys and values of all tokens of a step."""

    @abstractmethod
    def _draft(
        self,
        inputs: StepInputs,
        states: torch.Tensor | None,
        token_ids: torch.Tensor,
        num_drafts: int,
    ) -> torch.Tensor:
        """Return the drafts of each sequence, given the `states` of all tokens."""

    def _chosen(self, outputs: DraftOutputs, draw: _Draw | None) -> torch.Tensor:
        """Return a token for each output, `[num_rows]` int64; any token if its scores are NaN.

        `draw` returns local maxima with the noise of the target, so that drafts are drawn as the
        target draws its tokens; without it, the likeliest tokens are drafted.
        """
        logits, token_ids = self._drafter.logits(outputs), self._drafter.token_ids
        part, first_id = logits.part, logits.first_id
        if draw is None:
            maxima = self._choice.local_maxima(part, first_id)
            places = self._choice.tokens_of(logits.gather(maxima)).clamp_(min=0)
            return token_ids.index_select(0, places)
        # The noise is that of tokens of the target.
        size = len(part), self._drafter.vocab_size
        scores = part.new_full(size, -torch.inf, dtype=torch.float32)
        scores.index_copy_(1, token_ids[first_id : first_id + part.shape[1]], part.float())
        return self._choice.tokens_of(logits.gather(draw(scores))).clamp_(min=0)


class HostDrafting(Drafting):
    """Plans each pass on the host, which waits for the sampled tokens."""

    def _writer(self, inputs: StepInputs) -> Writer:
        return partial(self._forward_pass.metadata.write, kv_cache=self._kv_cache)

    def _draft(
        self,
        inputs: StepInputs,
        states: torch.Tensor | None,
        token_ids: torch.Tensor,
        num_drafts: int,
    ) -> torch.Tensor:
        drafter, found = self._drafter, list[torch.Tensor]()
        sampled = _last_sampled(inputs, token_ids)
        row_ids, positions = inputs.sampled_rows[sampled], inputs.sampled_positions[sampled]
        places = torch.from_numpy(sampled)
        # A sequence may have no token, as behind a mask that is late.
        token_ids = token_ids.index_select(0, places).clamp_(min=0)
        if inputs.logits_indices is not None:
            places = inputs.logits_indices[places]
        if states is not None:
            states = states.index_select(0, places)
        for number in range(num_drafts):
            of_pass = np.minimum(positions - drafter.lag + number, self._last_position)
            metadata = self._builder.build(self._batch.draft_batch(row_ids, of_pass))
            attention = CachedAttention(self._kv_cache, metadata)
            outputs = drafter.run(token_ids, states, torch.from_numpy(of_pass), attention)
            draw = None
            if len(drawn := self._sampler.random_rows(row_ids)):
                draw = partial(
                    self._draw, drawn, self._sampler.draws(row_ids, positions + number + 1)
                )
            token_ids, states = self._chosen(outputs, draw), outputs.states
            found.append(token_ids)
        return torch.stack(found, dim=1)

    def _draw(self, drawn: IntArray, draws: Draws, scores: torch.Tensor) -> torch.Tensor:
        """Return local maxima, with noise for the rows `drawn`, given the `draws` of all rows."""
        maxima = self._choice.local_maxima(scores, 0)
        maxima[torch.from_numpy(drawn)] = self._choice.drawn_maxima(
            scores, drawn, draws.of_rows(drawn), 0
        )
        return maxima


class WriteAttention(StepAttention):
    """Writes keys and values to the cache, and attends to nothing."""

    def __init__(self, write: Writer) -> None:
        super().__init__()
        self._write = write

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        query, key = inputs.split(layer)
        assert key is not None
        assert inputs.value is not None
        self._write(layer.layer_index, key, inputs.value)
        return query.flatten(1)


def _last_sampled(inputs: StepInputs, token_ids: torch.Tensor) -> IntArray:
    """Return the index of the last sampled token of each sequence: behind its last right draft."""
    if inputs.draft_ids is None:
        return np.arange(len(token_ids))
    chains = Chains(inputs.draft_ids)
    return chains.firsts + chains.num_tokens(token_ids) - 1

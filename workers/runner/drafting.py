"""Drafts of a draft head, behind the sampled tokens of a step.

The head reads all tokens of each step, so that the cache has the keys and values of its layer for
all tokens, as for the layers of the target. Drafts then follow the last token of each sequence, one
pass of the head after the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from attention.gpu.batch import PinnedRing, copy_from_host, copy_to_host
from attention.gpu.decode_schedule import DecodeMemory
from attention.gpu.draft_decodes import DraftDecodes
from workers.models.draft_head import HeadRows
from workers.models.self_attention import CachedAttention, HeadInputs, StepAttention
from workers.runner.decode_graphs import graph_batch_sizes
from workers.sampling.choice import Choice
from workers.sampling.device_choice import Uploader, upload_draws
from workers.sampling.edits import Chains

if TYPE_CHECKING:
    from collections.abc import Callable

    from attention.abstract import AttentionMetadata, AttentionMetadataBuilder
    from attention.gpu.metadata import GpuMetadataBuilder
    from attention.layer import Attention
    from workers.models.draft_head import DraftHead, HeadOutputs, Taps
    from workers.runner.input_batch import InputBatch, StepInputs
    from workers.sampler import Sampler
    from workers.sampling.choice import Draws, IntArray

__all__ = ["DeviceDrafting", "Drafting", "HostDrafting"]

_Draw: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
_Writer: TypeAlias = "Callable[[int, torch.Tensor, torch.Tensor], None]"
_NUM_OUTPUTS = 4
"""More than the number of steps with drafts that a rank has not sent yet."""


class Drafting(ABC):
    """Runs a draft head on the tokens of steps."""

    def __init__(
        self,
        head: DraftHead,
        taps: Taps,
        kv_cache: torch.Tensor,
        *,
        batch: InputBatch,
        sampler: Sampler,
    ) -> None:
        self._head = head
        self._taps = taps
        self._kv_cache = kv_cache
        self._batch = batch
        self._sampler = sampler
        self._choice = sampler.choice
        self._last_position = head.config.layer.max_positions - 1

    def run(
        self,
        inputs: StepInputs,
        metadata: AttentionMetadata,
        token_ids: torch.Tensor | None,
        num_drafts: int,
    ) -> torch.Tensor | None:
        """Read the tokens of a step, and return drafts `[num_sequences, num_drafts]` on the host.

        `metadata` is that of the step. `token_ids`, `[num_sampled]`, are the sampled tokens, which
        the rows have. None without drafts, or without sampled tokens. On a GPU, the drafts are
        written when the device has run this, as those of `TokenTable.append`.
        """
        head = self._head
        states = head.first_states(self._taps.of_step(len(inputs.token_ids)))
        rows = head.rows(self._batch.next_tokens(inputs), states)
        rotation = head.rotation(inputs.positions)
        head.attend(rows, rotation, _Write(self._writer(inputs, metadata)))
        if token_ids is None or not num_drafts:
            return None
        return self._draft(inputs, rows, token_ids, num_drafts)

    @abstractmethod
    def _writer(self, inputs: StepInputs, metadata: AttentionMetadata) -> _Writer:
        """Return a function that writes the keys and values of all tokens of a step."""

    @abstractmethod
    def _draft(
        self, inputs: StepInputs, rows: HeadRows, token_ids: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        """Return the drafts of each sequence; `rows` are those of all tokens."""

    def _chosen(self, outputs: HeadOutputs, draw: _Draw | None) -> torch.Tensor:
        """Return a token for each output, `[num_rows]` int64; any token if its scores are NaN.

        `draw` returns local maxima with the noise of the target, so that drafts are drawn as the
        target draws its tokens; without it, the likeliest tokens are drafted.
        """
        logits, token_ids = self._head.logits(outputs), self._head.token_ids
        part, first_id = logits.part, logits.first_id
        if draw is None:
            maxima = self._choice.local_maxima(part, first_id)
            places = self._choice.tokens_of(logits.gather(maxima)).clamp_(min=0)
            return token_ids.index_select(0, places)
        # The noise is that of tokens of the target.
        vocab_size = self._head.config.layer.vocab_size
        scores = part.new_full((len(part), vocab_size), -torch.inf, dtype=torch.float32)
        scores.index_copy_(1, token_ids[first_id : first_id + part.shape[1]], part.float())
        return self._choice.tokens_of(logits.gather(draw(scores))).clamp_(min=0)


class HostDrafting(Drafting):
    """Plans each pass on the host, which waits for the sampled tokens."""

    def __init__(
        self,
        head: DraftHead,
        taps: Taps,
        kv_cache: torch.Tensor,
        *,
        batch: InputBatch,
        sampler: Sampler,
        builder: AttentionMetadataBuilder,
    ) -> None:
        """`builder` plans the passes of drafts, and nothing else."""
        super().__init__(head, taps, kv_cache, batch=batch, sampler=sampler)
        self._builder = builder

    def _writer(self, inputs: StepInputs, metadata: AttentionMetadata) -> _Writer:
        del inputs
        return partial(metadata.write, kv_cache=self._kv_cache)

    def _draft(
        self, inputs: StepInputs, rows: HeadRows, token_ids: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        head, found = self._head, list[torch.Tensor]()
        sampled = _last_sampled(inputs, token_ids)
        row_ids, positions = inputs.sampled_rows[sampled], inputs.sampled_positions[sampled] - 1
        places = torch.from_numpy(sampled)
        if inputs.logits_indices is not None:
            places = inputs.logits_indices[places]
        rows = rows.select(places)
        for number in range(num_drafts):
            of_pass = np.minimum(positions + number, self._last_position)
            metadata = self._builder.build(self._batch.draft_batch(row_ids, of_pass))
            attention = CachedAttention(self._kv_cache, metadata)
            rotation = head.rotation(torch.from_numpy(of_pass))
            outputs = head.outputs(rows, head.attend(rows, rotation, attention))
            draw = None
            if len(drawn := self._sampler.random_rows(row_ids)):
                draw = partial(
                    self._draw, drawn, self._sampler.draws(row_ids, positions + number + 2)
                )
            found.append(self._chosen(outputs, draw))
            if number < num_drafts - 1:
                rows = head.rows(found[-1], outputs.states)
        return torch.stack(found, dim=1)

    def _draw(self, drawn: IntArray, draws: Draws, scores: torch.Tensor) -> torch.Tensor:
        """Return local maxima, with noise for the rows `drawn`; `draws` are those of all rows."""
        maxima = self._choice.local_maxima(scores, 0)
        maxima[torch.from_numpy(drawn)] = self._choice.drawn_maxima(
            scores, drawn, draws.of_rows(drawn), 0
        )
        return maxima


class DeviceDrafting(Drafting):
    """Launches all passes before the sampled tokens are known, for a GPU."""

    def __init__(
        self,
        head: DraftHead,
        taps: Taps,
        kv_cache: torch.Tensor,
        *,
        batch: InputBatch,
        sampler: Sampler,
        builder: GpuMetadataBuilder,
        max_num_rows: int,
        max_num_drafts: int,
        graphs: Any = None,  # Any: torch does not export the type
    ) -> None:
        """`graphs` is the memory of CUDA graphs of all passes; None launches each kernel."""
        super().__init__(head, taps, kv_cache, batch=batch, sampler=sampler)
        self._builder = builder
        device = kv_cache.device
        self._positions = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._num_slots = torch.zeros_like(self._positions)
        shape = max_num_rows, batch.max_num_blocks
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._memory = DecodeMemory(device)
        self._decodes: dict[int, DraftDecodes] = {}
        """The attention of a number of rows."""
        self._uploads = PinnedRing(device, num_buffers=_NUM_OUTPUTS)
        self._outputs = [
            torch.empty(max_num_rows * max_num_drafts, dtype=torch.int64, pin_memory=is_pinned)
            for is_pinned in [device.type == "cuda"] * _NUM_OUTPUTS
        ]
        self._turn = 0
        self._graphs = None
        if graphs is not None:
            self._graphs = _PassGraphs(self._passes, graphs, head, max_num_rows, device)
        self._max_num_drafts = max_num_drafts
        self._uploader = Uploader(device)
        self._firsts: IntArray

    def _writer(self, inputs: StepInputs, metadata: AttentionMetadata) -> _Writer:
        del metadata
        assert inputs.head_slots is not None
        return partial(
            self._builder.write_layer, kv_cache=self._kv_cache, slot_mapping=inputs.head_slots
        )

    def _draft(
        self, inputs: StepInputs, rows: HeadRows, token_ids: torch.Tensor, num_drafts: int
    ) -> torch.Tensor:
        indices = self._begin(inputs, token_ids)
        num_rows = len(indices)
        torch.sub(
            inputs.sampled_places[1].index_select(0, indices), 1, out=self._positions[:num_rows]
        )
        draws = self._draws(inputs.sampled_rows[self._firsts])
        size = num_rows
        if self._graphs is not None and draws is None:
            size = self._graphs.padded(num_rows)
            self._num_slots[num_rows:size].zero_()
        decodes = self._decodes_of(size)
        decodes.place(0)
        if inputs.logits_indices is not None:
            indices = inputs.logits_indices.index_select(0, indices)
        rows = rows.select(indices)
        if self._graphs is not None and draws is None:
            found = self._graphs.run(rows, decodes, num_drafts)
        else:
            found = self._passes(rows, decodes, draws, num_drafts)
        output = self._outputs[self._turn][: num_rows * num_drafts]
        self._turn = (self._turn + 1) % len(self._outputs)
        copy_to_host(output, found.view(-1))
        return output.view(num_rows, num_drafts)

    def _begin(self, inputs: StepInputs, token_ids: torch.Tensor) -> torch.Tensor:
        """Upload the blocks of sequences; return the sampled index of the last token of each."""
        draft_ids = inputs.draft_ids
        if draft_ids is None:
            firsts = np.arange(len(token_ids))
            ends, draft_ids = firsts + 1, np.full(len(token_ids), -1)
        else:
            chains = Chains(draft_ids)
            firsts, ends = chains.firsts, chains.firsts + chains.lengths
        self._firsts = firsts
        num_slots, tables = self._batch.draft_tables(inputs.sampled_rows[firsts])
        num_rows, width = tables.shape
        parts = draft_ids, firsts, ends, num_slots, tables.reshape(-1).view(np.int64)
        sizes = [len(part) for part in parts]
        uploaded = self._positions.new_empty(sum(sizes))
        with self._uploads.next_buffer(len(uploaded)) as words:
            np.concatenate(parts, out=words.numpy())
            copy_from_host(uploaded, words)
        drafts, first, end, slots, blocks = uploaded.split(sizes)
        self._num_slots[:num_rows].copy_(slots)
        self._tables[:num_rows, :width].copy_(blocks.view(torch.int32).view(num_rows, width))
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.draft_rows import find_last_tokens

        return find_last_tokens(token_ids, drafts, first, end, max_num_drafts=self._max_num_drafts)

    def _draws(self, rows: IntArray) -> _DeviceDraws | None:
        """Return how these rows of the batch draw tokens, or None if no row does."""
        if not len(drawn := self._sampler.random_rows(rows)):
            return None
        # The keys follow from the positions, which only the device knows.
        draws = self._sampler.draws(rows, np.zeros_like(rows))
        is_drawn = np.zeros(len(rows), dtype=np.int64)
        is_drawn[drawn] = 1
        # Parameters of other rows are not used, but must be numbers.
        draws = replace(draws, temperature=np.where(is_drawn, draws.temperature, 1.0))
        order, parameters = upload_draws(self._uploader, np.arange(len(rows)), draws)
        starts, flags = self._uploader.upload(
            np.stack((self._sampler.generator_starts(rows), is_drawn))
        )
        return _DeviceDraws(
            choice=self._choice,
            starts=starts,
            is_drawn=flags.bool(),
            order=order,
            parameters=parameters,
            positions=self._positions[: len(rows)],
        )

    def _passes(
        self, rows: HeadRows, decodes: DraftDecodes, draws: _DeviceDraws | None, num_drafts: int
    ) -> torch.Tensor:
        """Return the drafts, `[num_rows, num_drafts]`; the first token of each is placed."""
        head, found = self._head, list[torch.Tensor]()
        attention = _DeviceAttention(decodes)
        for number in range(num_drafts):
            rotation = head.rotation(decodes.places)
            outputs = head.outputs(rows, head.attend(rows, rotation, attention))
            draw = None if draws is None else partial(draws.draw, number)
            found.append(self._chosen(outputs, draw))
            if number < num_drafts - 1:
                decodes.place(number + 1)
                rows = head.rows(found[-1], outputs.states)
        return torch.stack(found, dim=1)

    def _decodes_of(self, num_rows: int) -> DraftDecodes:
        decodes = self._decodes.get(num_rows)
        if decodes is None:
            decodes = self._decodes[num_rows] = DraftDecodes(
                self._builder,
                self._head.attention.layer_index,
                self._kv_cache,
                positions=self._positions[:num_rows],
                num_slots=self._num_slots[:num_rows],
                tables=self._tables[:num_rows],
                last_position=self._last_position,
                memory=self._memory,
            )
        return decodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _DeviceDraws:
    """How rows draw drafts, with the positions of their last tokens on the device."""

    choice: Choice
    starts: torch.Tensor
    """The starts of their generators, `[num_rows]` int64."""
    is_drawn: torch.Tensor
    """Whether a row draws, `[num_rows]`; others take the likeliest tokens."""
    order: torch.Tensor
    """The indices of the rows, int64."""
    parameters: torch.Tensor
    """As in `choose_unfiltered`."""
    positions: torch.Tensor

    def draw(self, number: int, scores: torch.Tensor) -> torch.Tensor:
        """Return the local maxima of the draft `number` of each row."""
        from attention.kernels.triton.choice import local_maxima
        from attention.kernels.triton.draft_rows import key_drafts

        keys = self.parameters[-1].view(torch.int64)
        key_drafts(keys, starts=self.starts, positions=self.positions, number=number + 2)
        drawn = local_maxima(scores, self.order, 0, self.parameters)
        return torch.where(self.is_drawn, drawn, self.choice.local_maxima(scores, 0))


class _PassGraphs:
    """The passes of drafts as CUDA graphs, by number of rows and drafts.

    Passes of a number run once before they are captured.
    """

    def __init__(
        self,
        passes: Callable[[HeadRows, DraftDecodes, None, int], torch.Tensor],
        pool: Any,  # Any: torch does not export the type
        head: DraftHead,
        max_num_rows: int,
        device: torch.device,
    ) -> None:
        self._passes = passes
        self._pool = pool
        self._sizes = graph_batch_sizes(max_num_rows)
        size, dtype = head.config.layer.hidden_size, head.dtype
        self._rows = HeadRows(
            torch.zeros(max_num_rows, head.input_size, dtype=dtype, device=device),
            torch.zeros(max_num_rows, size, dtype=dtype, device=device),
        )
        self._stream = torch.cuda.Stream(device)
        self._captured: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, torch.Tensor] | None] = {}

    def padded(self, num_rows: int) -> int:
        """Return the number of rows that a graph for these rows has."""
        place = bisect_left(self._sizes, num_rows)
        return self._sizes[place] if place < len(self._sizes) else num_rows

    def run(self, rows: HeadRows, decodes: DraftDecodes, num_drafts: int) -> torch.Tensor:
        """Return the drafts, `[num_rows, num_drafts]`; the next run overwrites them."""
        num_rows, size = len(rows.residual), len(decodes.places)
        static = self._rows.first(size)
        static.normed[:num_rows].copy_(rows.normed)
        static.residual[:num_rows].copy_(rows.residual)
        key = size, num_drafts
        if key not in self._captured:
            self._captured[key] = None
            return self._passes(static, decodes, None, num_drafts)[:num_rows]
        captured = self._captured[key]
        if captured is None:
            # The capture runs nothing.
            captured = self._captured[key] = self._capture(static, decodes, num_drafts)
        graph, found = captured
        graph.replay()
        return found[:num_rows]

    def _capture(
        self, rows: HeadRows, decodes: DraftDecodes, num_drafts: int
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Kernels may be loaded, and other threads, such as NCCL's watchdog, may call CUDA.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"
        ):
            found = self._passes(rows, decodes, None, num_drafts)
        return graph, found


class _DeviceAttention(StepAttention):
    """Attends for drafts with lengths on the device."""

    def __init__(self, decodes: DraftDecodes) -> None:
        super().__init__()
        self._decodes = decodes

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        return self._decodes.attend(self.split(layer, inputs)).flatten(1)


class _Write(StepAttention):
    """Writes keys and values to the cache, and attends to nothing."""

    def __init__(self, write: _Writer) -> None:
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
    is_accepted = chains.accepted(token_ids).numpy() >= 0
    # The first token of a chain is sampled whatever it is.
    is_accepted[chains.firsts] = True
    lengths = np.add.reduceat(is_accepted, chains.firsts, dtype=np.int64)
    return chains.firsts + lengths - 1

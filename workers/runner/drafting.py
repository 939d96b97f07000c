"""Drafts of a draft head or a draft model, behind the sampled tokens of a step.

The drafter reads all tokens of each step, so that the cache has the keys and values of its layers
for all tokens, as for the layers of the target. Drafts then follow the last token of each sequence,
one pass of the drafter after the other.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from attention.gpu.batch import PinnedRing, copy_from_host, copy_to_host
from attention.gpu.decode_schedule import DecodeMemory
from attention.gpu.draft_decodes import DraftDecodes
from attention.kernels.triton.choice import local_maxima
from attention.kernels.triton.choice.scores import NUM_PARAMETERS
from attention.kernels.triton.draft_rows import (
    BegunDrafts,
    begin_drafts,
    find_last_tokens,
    key_drafts,
    pack_drafts,
)
from workers.models.self_attention import CachedAttention, HeadInputs, StepAttention
from workers.sampling.choice import Choice
from workers.sampling.device_choice import Uploader, upload_draws
from workers.sampling.edits import Chains

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from attention.abstract import AttentionMetadata, AttentionMetadataBuilder
    from attention.gpu.metadata import GpuMetadataBuilder
    from attention.layer import Attention
    from workers.models.draft_head import DraftOutputs, RankDrafter
    from workers.runner.input_batch import InputBatch, StepInputs
    from workers.sampler import Sampler
    from workers.sampling.choice import Draws, IntArray

__all__ = ["DeviceDrafting", "Drafting", "HostDrafting"]

logger = logging.getLogger(__name__)

_Draw: TypeAlias = "Callable[[torch.Tensor], torch.Tensor]"
_Writer: TypeAlias = "Callable[[int, torch.Tensor, torch.Tensor], None]"
_MOST_TOKENS = 512
"""Tokens of a step up to which a graph has all launches of the head."""


class Drafting(ABC):
    """Runs a drafter on the tokens of steps."""

    def __init__(
        self,
        drafter: RankDrafter,
        kv_cache: torch.Tensor,
        *,
        batch: InputBatch,
        sampler: Sampler,
    ) -> None:
        self._drafter = drafter
        self._kv_cache = kv_cache
        self._batch = batch
        self._sampler = sampler
        self._choice = sampler.choice
        self._last_position = drafter.layers.max_positions - 1

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
        written when the device has run this, and valid until the next drafts.
        """
        states = self._read(inputs, metadata)
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

    def _read(self, inputs: StepInputs, metadata: AttentionMetadata) -> torch.Tensor | None:
        """Read all tokens of a step; return their states."""
        drafter = self._drafter
        if not drafter.lag:
            attention = CachedAttention(self._kv_cache, metadata)
            return drafter.read(inputs.token_ids, inputs.positions, attention)
        write = _Write(self._writer(inputs, metadata))
        return drafter.read(self._batch.next_tokens(inputs), inputs.positions, write)

    @abstractmethod
    def _writer(self, inputs: StepInputs, metadata: AttentionMetadata) -> _Writer:
        """Return a function that writes the keys and values of all tokens of a step."""

    @abstractmethod
    def _draft(
        self,
        inputs: StepInputs,
        states: torch.Tensor | None,
        token_ids: torch.Tensor,
        num_drafts: int,
    ) -> torch.Tensor:
        """Return the drafts of each sequence; `states` are those of all tokens."""

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

    def __init__(
        self,
        drafter: RankDrafter,
        kv_cache: torch.Tensor,
        *,
        batch: InputBatch,
        sampler: Sampler,
        builder: AttentionMetadataBuilder,
    ) -> None:
        """`builder` plans the passes of drafts, and nothing else."""
        super().__init__(drafter, kv_cache, batch=batch, sampler=sampler)
        self._builder = builder

    def _writer(self, inputs: StepInputs, metadata: AttentionMetadata) -> _Writer:
        del inputs
        return partial(metadata.write, kv_cache=self._kv_cache)

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
        token_ids = token_ids.index_select(0, places)
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
        drafter: RankDrafter,
        kv_cache: torch.Tensor,
        *,
        batch: InputBatch,
        sampler: Sampler,
        builder: GpuMetadataBuilder,
        max_num_rows: int,
        max_num_tokens: int,
        max_num_drafts: int,
        graphs: Any = None,  # Any: torch does not export the type
    ) -> None:
        """`graphs` is the memory of CUDA graphs; without it, each kernel is launched by itself."""
        super().__init__(drafter, kv_cache, batch=batch, sampler=sampler)
        self._builder = builder
        device = kv_cache.device
        self._positions = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._num_slots = torch.zeros_like(self._positions)
        shape = max_num_rows, batch.max_num_blocks
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._memory = DecodeMemory(device)
        self._decodes: dict[int, DraftDecodes] = {}
        """The attention of a number of rows."""
        self._uploads = PinnedRing(device)
        self._output = torch.empty(
            max_num_rows * max_num_drafts, dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        """The drafts of the latest step, on the host. No two steps with drafts are in flight."""
        self._max_num_drafts = max_num_drafts
        self._uploader = Uploader(device)
        self._graph_pool = graphs
        if graphs is not None:
            self._stream = torch.cuda.Stream(device)
        width = max_num_drafts + 1
        limit = max(1, min(max_num_rows, min(_MOST_TOKENS, max_num_tokens) // width))
        self._sizes = sorted({limit, *(1 << bit for bit in range(limit.bit_length()))})
        """Numbers of sequences that steps of decodes are padded to."""
        num_tokens, num_rows = max(self._sizes, default=0) * width, max(self._sizes, default=0)
        self._tokens = self._positions.new_zeros(3, num_tokens)
        """The next token, position and slot of each token of a step of decodes."""
        self._sequences = self._positions.new_zeros(3, num_rows)
        """The last token of each sequence, the start of its generator, and whether it draws."""
        self._words = torch.zeros(
            2 + 4 * num_tokens + num_rows * (6 + batch.max_num_blocks // 2),
            dtype=torch.int64,
            pin_memory=device.type == "cuda",
        )
        self._phases = {
            (size, has_draws): self._make_phase(size, has_draws=has_draws)
            for size in self._sizes
            for has_draws in (False, True)
        }

    def run(
        self,
        inputs: StepInputs,
        metadata: AttentionMetadata,
        token_ids: torch.Tensor | None,
        num_drafts: int,
    ) -> torch.Tensor | None:
        are_decodes = inputs.logits_indices is None and not inputs.attention.num_prefills
        if num_drafts and token_ids is not None and are_decodes:
            found = self._run_phase(inputs, num_drafts)
            if found is not None:
                return found
        return super().run(inputs, metadata, token_ids, num_drafts)

    def warm_up(self) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        for has_draws in (False, True):
            self._pack(
                self._phases[self._sizes[0], has_draws],
                (nothing,) * 4,
                (nothing,) * 6,
                np.zeros((0, 2), dtype=np.int32),
            )
            self._draft_decodes(self._phases[self._sizes[0], has_draws])

    def capture_graphs(self, *, only_largest: bool = False) -> None:
        if self._graph_pool is None:
            return
        # The largest first, since smaller captures reuse its memory.
        for size in self._sizes[-1:] if only_largest else reversed(self._sizes):
            for has_draws in (False, True):
                self._capture(self._phases[size, has_draws])

    def capture_next(self) -> bool:
        missing = (phase for phase in self._phases.values() if phase.graph is None)
        phase = None if self._graph_pool is None else next(missing, None)
        if phase is None:
            return False
        try:
            self._capture(phase)
        # As for other graphs, the next step raises if the device has failed.
        except Exception as error:
            self._graph_pool = None
            logger.warning("Could not capture a graph of drafts; some steps are slower: %s", error)
        return True

    @torch.inference_mode()
    def _capture(self, phase: _Phase) -> None:
        if phase.graph is not None:
            return
        graph = torch.cuda.CUDAGraph()
        # If a capture fails, torch may leave its stream as the current stream. Kernels may be
        # loaded, and other threads, such as NCCL's watchdog, may call CUDA.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(
                graph, pool=self._graph_pool, stream=self._stream, capture_error_mode="relaxed"
            ),
        ):
            self._draft_decodes(phase)
        phase.graph = graph

    def _writer(self, inputs: StepInputs, metadata: AttentionMetadata) -> _Writer:
        del metadata
        assert inputs.head_slots is not None
        return partial(
            self._builder.write_layer, kv_cache=self._kv_cache, slot_mapping=inputs.head_slots
        )

    def _draft(
        self,
        inputs: StepInputs,
        states: torch.Tensor | None,
        token_ids: torch.Tensor,
        num_drafts: int,
    ) -> torch.Tensor:
        firsts, ends = _chain_bounds(inputs)
        indices = self._begin(inputs, token_ids, firsts, ends)
        num_rows = len(indices)
        torch.sub(
            inputs.sampled_places[1].index_select(0, indices), 1, out=self._positions[:num_rows]
        )
        decodes = self._decodes_of(num_rows)
        decodes.place(0)
        token_ids = token_ids.index_select(0, indices)
        if inputs.logits_indices is not None:
            indices = inputs.logits_indices.index_select(0, indices)
        draws = self._draws(inputs.sampled_rows[firsts])
        assert states is not None
        states = states.index_select(0, indices)
        found = self._passes(token_ids, states, decodes, draws, num_drafts)
        output = self._output[: num_rows * num_drafts]
        copy_to_host(output, found.view(-1))
        return output.view(num_rows, num_drafts)

    def _run_phase(self, inputs: StepInputs, num_drafts: int) -> torch.Tensor | None:
        """Return the drafts behind a step of decodes, with one launch; None if it is too large.

        The launches are those of the most drafts, so that there are few graphs.

        No other step with drafts may be in flight, since the memory of its numbers is the same.
        """
        firsts, ends = _chain_bounds(inputs)
        num_rows = len(firsts)
        if num_rows > self._sizes[-1] or (ends - firsts).max() > self._max_num_drafts + 1:
            return None
        row_ids = inputs.sampled_rows[firsts]
        drawn = self._sampler.random_rows(row_ids)
        phase = self._phase_for(num_rows, has_draws=len(drawn) > 0)
        is_drawn = np.zeros(num_rows, dtype=np.int64)
        is_drawn[drawn] = 1
        draws = self._sampler.draws(row_ids, np.zeros_like(row_ids))
        scales = 1.0 / np.where(is_drawn, draws.temperature, 1.0)
        num_slots, tables = self._batch.draft_tables(row_ids)
        draft_ids = inputs.draft_ids
        if draft_ids is None:
            draft_ids = np.full(len(inputs.sampled_rows), -1)
        tokens = (
            inputs.sampled_rows,
            inputs.sampled_positions - 1,
            self._batch.head_slots(inputs),
            draft_ids,
        )
        starts = self._sampler.generator_starts(row_ids)
        numbers = firsts, ends, num_slots, scales.view(np.int64), starts, is_drawn
        self._pack(phase, tokens, numbers, tables)
        if phase.graph is None:
            self._draft_decodes(phase)
        else:
            phase.graph.replay()
        return phase.output[:num_rows, :num_drafts]

    def _phase_for(self, num_rows: int, *, has_draws: bool) -> _Phase:
        """Return the smallest phase for so many sequences, if possible one with a graph."""
        fitting = [self._phases[size, has_draws] for size in self._sizes if size >= num_rows]
        return next((phase for phase in fitting if phase.graph is not None), fitting[0])

    def _pack(
        self,
        phase: _Phase,
        tokens: Sequence[NDArray[np.int64]],
        sequences: Sequence[NDArray[np.int64]],
        tables: NDArray[np.int32],
    ) -> None:
        begun = phase.begun
        num_tokens, num_rows = len(begun.next_ids), len(begun.indices)
        words = self._words.numpy()
        pack_drafts(words, tokens, sequences, tables, num_tokens=num_tokens, num_rows=num_rows)

    def _draft_decodes(self, phase: _Phase) -> None:
        """Read the tokens of a step of decodes, and write drafts to the host."""
        begun, decodes = phase.begun, phase.decodes
        begin_drafts(
            begun, self._words, self._batch.all_tokens, max_num_drafts=self._max_num_drafts
        )
        decodes.place(0)
        write = partial(
            self._builder.write_layer, kv_cache=self._kv_cache, slot_mapping=begun.slots
        )
        states = self._drafter.read(begun.next_ids, begun.places, _Write(write))
        assert states is not None
        token_ids = begun.next_ids.index_select(0, begun.indices)
        states = states.index_select(0, begun.indices)
        number = self._max_num_drafts
        found = self._passes(token_ids, states, decodes, phase.draws, number)
        copy_to_host(phase.output.view(-1), found.view(-1))

    def _make_phase(self, size: int, *, has_draws: bool) -> _Phase:
        num_tokens = size * (self._max_num_drafts + 1)
        parameters = torch.zeros(
            NUM_PARAMETERS, size, dtype=torch.float64, device=self._positions.device
        )
        indices, starts, flags = self._sequences[:, :size]
        draws = None
        if has_draws:
            draws = _DeviceDraws(
                choice=self._choice,
                starts=starts,
                is_drawn=flags,
                order=torch.arange(size, device=starts.device),
                parameters=parameters,
                positions=self._positions[:size],
            )
        next_ids, places, slots = self._tokens[:, :num_tokens]
        begun = BegunDrafts(
            next_ids=next_ids,
            places=places,
            slots=slots,
            indices=indices,
            positions=self._positions[:size],
            num_slots=self._num_slots[:size],
            scales=parameters[0].view(torch.int64),
            starts=starts,
            flags=flags,
            tables=self._tables[:size],
        )
        output = self._output[: size * self._max_num_drafts].view(size, -1)
        return _Phase(begun, self._decodes_of(size), draws, output)

    def _begin(
        self, inputs: StepInputs, token_ids: torch.Tensor, firsts: IntArray, ends: IntArray
    ) -> torch.Tensor:
        """Upload the blocks of sequences; return the sampled index of the last token of each.

        The sampled tokens of a sequence are from `firsts` to before `ends`.
        """
        draft_ids = inputs.draft_ids
        if draft_ids is None:
            draft_ids = np.full(len(token_ids), -1)
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
        most = int((ends - firsts).max())
        return find_last_tokens(token_ids, drafts, first, end, max_num_drafts=most)

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
            is_drawn=flags,
            order=order,
            parameters=parameters,
            positions=self._positions[: len(rows)],
        )

    def _passes(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor | None,
        decodes: DraftDecodes,
        draws: _DeviceDraws | None,
        num_drafts: int,
    ) -> torch.Tensor:
        """Return the drafts, `[num_rows, num_drafts]`; the first token of each is placed."""
        found, attention = list[torch.Tensor](), _DeviceAttention(decodes)
        for number in range(num_drafts):
            outputs = self._drafter.run(token_ids, states, decodes.places, attention)
            draw = None if draws is None else partial(draws.draw, number)
            token_ids, states = self._chosen(outputs, draw), outputs.states
            found.append(token_ids)
            if number < num_drafts - 1:
                decodes.place(number + 1)
        return torch.stack(found, dim=1)

    def _decodes_of(self, num_rows: int) -> DraftDecodes:
        decodes = self._decodes.get(num_rows)
        if decodes is None:
            decodes = self._decodes[num_rows] = DraftDecodes(
                self._builder,
                self._drafter.layers.cache_offset,
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
    """1 for rows that draw, `[num_rows]` int64; others take the likeliest tokens."""
    order: torch.Tensor
    """The indices of the rows, int64."""
    parameters: torch.Tensor
    """As in `choose_unfiltered`."""
    positions: torch.Tensor

    def draw(self, number: int, scores: torch.Tensor) -> torch.Tensor:
        """Return the local maxima of the draft `number` of each row."""
        keys = self.parameters[-1].view(torch.int64)
        key_drafts(keys, starts=self.starts, positions=self.positions, number=number + 2)
        drawn = local_maxima(scores, self.order, 0, self.parameters)
        return torch.where(self.is_drawn > 0, drawn, self.choice.local_maxima(scores, 0))


@dataclass(slots=True, eq=False)
class _Phase:
    """The launches of a head behind a step of decodes, on memory of fixed addresses."""

    begun: BegunDrafts
    decodes: DraftDecodes
    draws: _DeviceDraws | None
    output: torch.Tensor
    """The drafts on the host, `[num_rows, max_num_drafts]` int64."""
    graph: torch.cuda.CUDAGraph | None = None


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


def _chain_bounds(inputs: StepInputs) -> tuple[IntArray, IntArray]:
    """Return the first sampled token of each sequence, and the end of its sampled tokens."""
    if inputs.draft_ids is None:
        firsts = np.arange(len(inputs.sampled_rows))
        return firsts, firsts + 1
    chains = Chains(inputs.draft_ids)
    return chains.firsts, chains.firsts + chains.lengths


def _last_sampled(inputs: StepInputs, token_ids: torch.Tensor) -> IntArray:
    """Return the index of the last sampled token of each sequence: behind its last right draft."""
    if inputs.draft_ids is None:
        return np.arange(len(token_ids))
    chains = Chains(inputs.draft_ids)
    return chains.firsts + chains.num_tokens(token_ids) - 1

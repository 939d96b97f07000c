"""Drafts on a GPU, which are launched before the tokens that they follow are known."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from attention.gpu.batch import PinnedRing, copy_from_host
from attention.gpu.decode_schedule import DecodeMemory
from attention.gpu.draft_decodes import DraftDecodes
from attention.kernels.triton.choice import local_maxima
from attention.kernels.triton.choice.scores import NUM_PARAMETERS
from attention.kernels.triton.draft_rows import (
    BegunDrafts,
    begin_drafts,
    key_drafts,
    num_words,
    pack_drafts,
    publish_drafts,
)
from workers.models.self_attention import StepAttention
from workers.runner.drafting import Drafting, WriteAttention, Writer
from workers.sampling.choice import Choice
from workers.sampling.edits import Chains

if TYPE_CHECKING:
    from attention.gpu.metadata import GpuMetadataBuilder
    from attention.layer import Attention
    from workers.models.draft_head import RankDrafter
    from workers.models.self_attention import HeadInputs
    from workers.runner.forward_pass import ForwardPass
    from workers.runner.input_batch import InputBatch, StepInputs
    from workers.sampler import Sampler
    from workers.sampling.choice import IntArray

__all__ = ["DeviceDrafting"]

logger = logging.getLogger(__name__)

_MOST_TOKENS = 512
"""Tokens of a step up to which a graph has all launches of the drafter."""
_NUM_OUTPUTS = 3
"""More than the steps with drafts that a rank has not sent yet."""
_Step: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
"""The tokens of a step and their positions, `[num_tokens]` int64 each."""


class DeviceDrafting(Drafting):
    """Launches all passes before the sampled tokens are known."""

    _builder: GpuMetadataBuilder

    def __init__(
        self,
        drafter: RankDrafter,
        kv_cache: torch.Tensor,
        *,
        forward_pass: ForwardPass,
        batch: InputBatch,
        sampler: Sampler,
        builder: GpuMetadataBuilder,
        max_num_rows: int,
        max_num_tokens: int,
        max_num_drafts: int,
        graphs: Any = None,  # Any: torch does not export the type
    ) -> None:
        """`graphs` is the memory of CUDA graphs; without it, each kernel is launched by itself."""
        super().__init__(
            drafter,
            kv_cache,
            forward_pass=forward_pass,
            batch=batch,
            sampler=sampler,
            builder=builder,
        )
        self._table = batch.table
        device, is_cuda = kv_cache.device, kv_cache.device.type == "cuda"
        self._positions = torch.zeros(max_num_rows, dtype=torch.int64, device=device)
        self._num_slots = torch.zeros_like(self._positions)
        shape = max_num_rows, batch.max_num_blocks
        self._tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._memory = DecodeMemory(device)
        self._decodes: dict[int, DraftDecodes] = {}
        """The attention of a number of rows."""
        self._uploads = PinnedRing(device)
        self._words = self._positions.new_zeros(num_words(*shape))
        """Numbers of the host for the sequences of the latest step with drafts."""
        self._outputs = [
            torch.empty(max_num_rows * max_num_drafts, dtype=torch.int64, pin_memory=is_cuda)
            for _ in range(_NUM_OUTPUTS)
        ]
        """The drafts of the latest steps, on the host."""
        self._turn = 0
        self._max_num_drafts = max_num_drafts
        self._graph_pool = graphs
        if graphs is not None:
            self._stream = torch.cuda.Stream(device)
        width = max_num_drafts + 1
        limit = max(1, min(max_num_rows, min(_MOST_TOKENS, max_num_tokens) // width))
        self._sizes = sorted({limit, *(1 << bit for bit in range(limit.bit_length()))})
        """Numbers of sequences that steps of decodes are padded to."""
        self._tokens = self._positions.new_zeros(3, limit * width)
        """The next token, position and slot of each token of a step of decodes."""
        self._sequences = self._positions.new_zeros(4, max_num_rows)
        """The last token of each sequence, the token that follows it, the start of its generator,
        and whether it draws."""
        # The forward pass has a draft model read the tokens of a step.
        num_places = width if drafter.lag else 0
        self._phases = {
            (size, has_draws): self._make_phase(
                size, num_places=size * num_places, has_draws=has_draws
            )
            for size in self._sizes
            for has_draws in (False, True)
        }

    def run(
        self,
        inputs: StepInputs,
        token_ids: torch.Tensor | None,
        num_drafts: int,
    ) -> torch.Tensor | None:
        has_phase = num_drafts > 0 or inputs.is_overlapped
        # Phases have a head read the tokens of steps with decodes alone.
        are_decodes = inputs.logits_indices is None and not inputs.attention.num_prefills
        if has_phase and token_ids is not None and (are_decodes or not self._drafter.lag):
            firsts, ends = _chain_bounds(inputs)
            drawn = self._sampler.random_rows(inputs.sampled_rows[firsts])
            phase = self._phase_for(firsts, ends, has_draws=len(drawn) > 0)
            if phase is not None:
                if not self._drafter.lag:
                    self._read(inputs)
                self._upload(phase, inputs, firsts, ends, drawn)
                if phase.graph is None:
                    step = inputs.token_ids, inputs.positions
                    phase.drafts = self._draft_decodes(phase, step)
                else:
                    phase.graph.replay()
                self._table.has_refused = True
                return self._published(phase, len(firsts), num_drafts)
        return super().run(inputs, token_ids, num_drafts)

    def warm_up(self) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        step = self._positions[:1], torch.zeros_like(self._positions[:1])
        for has_draws in (False, True):
            phase = self._phases[self._sizes[0], has_draws]
            self._upload_words(phase, (nothing,) * 7, np.zeros((0, 2), dtype=np.int32), 0)
            phase.drafts = self._draft_decodes(phase, step)
            self._published(phase, 1, self._max_num_drafts)
        self._begin(self._make_phase(1, num_places=0, has_draws=False), step)

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
            step = self._table.token_ids, self._table.positions
            phase.drafts = self._draft_decodes(phase, step)
        phase.graph = graph

    def _writer(self, inputs: StepInputs) -> Writer:
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
        drawn = self._sampler.random_rows(inputs.sampled_rows[firsts])
        phase = self._make_phase(len(firsts), num_places=0, has_draws=len(drawn) > 0)
        self._upload(phase, inputs, firsts, ends, drawn)
        self._begin(phase, (inputs.token_ids, inputs.positions))
        phase.drafts = self._passes(phase, states, num_drafts)
        found = self._published(phase, len(firsts), num_drafts)
        assert found is not None
        return found

    def _phase_for(self, firsts: IntArray, ends: IntArray, *, has_draws: bool) -> _Phase | None:
        """Return the smallest phase for a step of decodes, if possible a phase with a graph.

        None if the step is too large. Phases make the most drafts, so that there are few graphs.
        """
        num_rows = len(firsts)
        if num_rows > self._sizes[-1] or (ends - firsts).max() > self._max_num_drafts + 1:
            return None
        fitting = [self._phases[size, has_draws] for size in self._sizes if size >= num_rows]
        return next((phase for phase in fitting if phase.graph is not None), fitting[0])

    def _upload(
        self, phase: _Phase, inputs: StepInputs, firsts: IntArray, ends: IntArray, drawn: IntArray
    ) -> None:
        """Upload the numbers of the sequences of a step.

        Their sampled tokens are from `firsts` to before `ends`; the sequences `drawn` draw tokens.
        """
        rows = inputs.sampled_rows[firsts]
        is_drawn = np.zeros(len(rows), dtype=np.int64)
        is_drawn[drawn] = 1
        draws = self._sampler.draws(rows, np.zeros_like(rows))
        # Parameters of other rows are not used, but must be numbers.
        scales = 1.0 / np.where(is_drawn, draws.temperature, 1.0)
        num_slots, tables = self._batch.draft_tables(rows)
        if inputs.sampled_indices is not None:
            firsts, ends = inputs.sampled_indices[firsts], inputs.sampled_indices[ends - 1] + 1
        starts = self._sampler.generator_starts(rows)
        sequences = rows, firsts, ends, num_slots, scales.view(np.int64), starts, is_drawn
        self._upload_words(phase, sequences, tables, len(inputs.token_ids))

    def _upload_words(
        self,
        phase: _Phase,
        sequences: tuple[IntArray, ...],
        tables: np.ndarray[Any, np.dtype[np.int32]],
        num_tokens: int,
    ) -> None:
        num_rows = len(phase.begun.indices)
        size = num_words(num_rows, tables.shape[1])
        with self._uploads.next_buffer(size) as words:
            pack_drafts(words.numpy(), sequences, tables, num_tokens=num_tokens, num_rows=num_rows)
            copy_from_host(self._words[:size], words)

    def _begin(self, phase: _Phase, step: _Step) -> None:
        """Find the last token of each sequence, and prepare the first pass."""
        begin_drafts(
            phase.begun,
            self._words,
            step,
            self._table.all_tokens,
            block_size=self._batch.block_size,
            max_num_drafts=self._max_num_drafts,
        )
        phase.decodes.place(1 - self._drafter.lag)

    def _draft_decodes(self, phase: _Phase, step: _Step) -> torch.Tensor:
        """Return the most drafts behind a step of decodes, of which heads read the tokens first."""
        begun = phase.begun
        self._begin(phase, step)
        if not self._drafter.lag:
            return self._passes(phase, None, self._max_num_drafts)
        write = partial(
            self._builder.write_layer, kv_cache=self._kv_cache, slot_mapping=begun.slots
        )
        states = self._drafter.read(begun.next_ids, begun.places, WriteAttention(write))
        return self._passes(phase, states, self._max_num_drafts)

    def _passes(self, phase: _Phase, states: torch.Tensor | None, num_drafts: int) -> torch.Tensor:
        """Return drafts `[num_rows, num_drafts]`, given the `states` of all tokens of the step."""
        found, attention = list[torch.Tensor](), _DeviceAttention(phase.decodes)
        token_ids, draws = phase.begun.last_ids, phase.draws
        if states is not None:
            states = states.index_select(0, phase.begun.indices)
        for number in range(num_drafts):
            outputs = self._drafter.run(token_ids, states, phase.decodes.places, attention)
            draw = None if draws is None else partial(draws.draw, number)
            token_ids, states = self._chosen(outputs, draw), outputs.states
            found.append(token_ids)
            if number < num_drafts - 1:
                phase.decodes.place(number + 2 - self._drafter.lag)
        return torch.stack(found, dim=1)

    def _published(self, phase: _Phase, num_sequences: int, num_drafts: int) -> torch.Tensor | None:
        """Write the first drafts of sequences to the token table and the host; return the latter.

        None without drafts.
        """
        assert phase.drafts is not None
        output = self._outputs[self._turn][: num_sequences * num_drafts]
        output = output.view(num_sequences, num_drafts)
        self._turn = (self._turn + 1) % _NUM_OUTPUTS
        publish_drafts(
            output,
            self._table.all_tokens,
            self._table.num_refused,
            phase.drafts,
            self._words,
            phase.begun,
        )
        return output if num_drafts else None

    def _make_phase(self, size: int, *, num_places: int, has_draws: bool) -> _Phase:
        """Return a phase of up to `size` sequences, with places for the tokens of decodes."""
        indices, last_ids, starts, flags = self._sequences[:, :size]
        parameters = torch.zeros(NUM_PARAMETERS, size, dtype=torch.float64, device=starts.device)
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
        next_ids, places, slots = self._tokens[:, :num_places]
        begun = BegunDrafts(
            next_ids=next_ids,
            places=places,
            slots=slots,
            indices=indices,
            last_ids=last_ids,
            positions=self._positions[:size],
            num_slots=self._num_slots[:size],
            scales=parameters[0].view(torch.int64),
            starts=starts,
            flags=flags,
            tables=self._tables[:size],
        )
        return _Phase(begun, self._decodes_of(size), draws)

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
    """The launches behind a step, on memory of fixed addresses."""

    begun: BegunDrafts
    decodes: DraftDecodes
    draws: _DeviceDraws | None
    drafts: torch.Tensor | None = None
    """The latest drafts, `[num_rows, most drafts]` int64."""
    graph: torch.cuda.CUDAGraph | None = None


class _DeviceAttention(StepAttention):
    """Attends for drafts with lengths on the device."""

    def __init__(self, decodes: DraftDecodes) -> None:
        super().__init__()
        self._decodes = decodes

    def attend(self, layer: Attention, inputs: HeadInputs) -> torch.Tensor:
        return self._decodes.attend(layer.layer_index, self.split(layer, inputs)).flatten(1)


def _chain_bounds(inputs: StepInputs) -> tuple[IntArray, IntArray]:
    """Return the first sampled token of each sequence, and the end of its sampled tokens."""
    if inputs.draft_ids is None:
        firsts = np.arange(len(inputs.sampled_rows))
        return firsts, firsts + 1
    chains = Chains(inputs.draft_ids)
    return chains.firsts, chains.firsts + chains.lengths

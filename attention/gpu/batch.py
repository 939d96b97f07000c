"""The integer inputs of a step on the GPU, uploaded in one copy.

Batches of equal shapes have equal addresses, which is all that a captured graph needs of its
inputs.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from attention.params import AttentionType

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attention.batch import AttentionBatch

__all__ = ["GpuBatch", "GpuBatchUploader", "PinnedRing", "SubBatch", "copy_from_host"]

_Ints = npt.NDArray[np.int32]
_Array = npt.NDArray[Any]  # int32 or int64
_ALIGNMENT = 16
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SubBatch:
    """Adjacent sequences of one step, and the keys that they see."""

    first_token: int
    num_tokens: int
    query_lens: _Ints
    """`[num_sequences]`, on the host, and so are the next two."""
    host_seq_lens: _Ints
    host_block_tables: _Ints | None
    """None where keys do not come from the cache."""
    query_starts: torch.Tensor
    """Query tokens before each sequence, from `first_token`, `[num_sequences + 1]` int32."""
    seq_lens: torch.Tensor
    """Keys of each sequence, `[num_sequences]` int32."""
    block_tables: torch.Tensor | None
    """`[num_sequences, width]` int32."""
    max_query_len: int
    max_seq_len: int
    """An upper bound, also for every replay of a captured graph."""
    has_no_context: bool
    """Whether every sequence has only the keys of its own query tokens."""
    max_excess: int = 0
    """As in `AttentionBatch`."""

    @property
    def tokens(self) -> slice:
        """Return the tokens of the step that these sequences compute."""
        return slice(self.first_token, self.first_token + self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GpuBatch:
    """One step on the GPU; valid until its uploader is used again."""

    prefills: SubBatch | None
    decodes: SubBatch | None
    cross_prefills: SubBatch | None
    """The prefills again, over the keys of their encoders."""
    cross_decodes: SubBatch | None
    encoders: SubBatch | None
    """The encoders that run in this step."""
    slot_mapping: torch.Tensor
    """`[num_tokens]` int64."""
    encoder_slot_mapping: torch.Tensor | None
    num_padding: int
    other_groups: tuple[GpuBatch, ...] = ()
    """The step in the blocks of each group of layers after the first."""

    @property
    def groups(self) -> tuple[GpuBatch, ...]:
        """Return the step in the blocks of each group of layers."""
        return (self, *self.other_groups)

    def of_group(self, group: int) -> GpuBatch:
        """Return the step in the blocks of one group of layers."""
        return self.other_groups[group - 1] if group else self

    def sub_batches_of(self, kind: AttentionType) -> tuple[SubBatch | None, SubBatch | None]:
        """Return the prefills and the decodes over the keys that layers of a type see."""
        if kind is AttentionType.ENCODER_DECODER:
            return self.cross_prefills, self.cross_decodes
        return self.prefills, self.decodes

    def slots_of(self, kind: AttentionType) -> torch.Tensor:
        """Return the cache slots that layers of a type write, one per token, int64."""
        if kind is not AttentionType.ENCODER_DECODER:
            return self.slot_mapping
        assert self.encoder_slot_mapping is not None
        return self.encoder_slot_mapping


class GpuBatchUploader:
    """Uploads steps from pinned memory to one buffer on the GPU."""

    def __init__(self, device: torch.device, *, max_seq_lens: Sequence[int] | None = None) -> None:
        """`max_seq_lens` are the bounds of each group, for graphs; None takes the step's own."""
        self._device = device
        self._max_seq_lens = max_seq_lens
        self._pinned = PinnedRing(device)
        self._on_device = torch.empty(0, dtype=torch.int64, device=device)
        self._layout: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        self._tensors: list[torch.Tensor] = []
        self._latest: GpuBatch | None = None

    def upload(self, batch: AttentionBatch) -> GpuBatch:
        """Return the step's numbers on the device, without waiting for it."""
        arrays: list[_Array] = []
        hosts: list[_HostBatch] = []
        for group in batch.groups:
            hosts.append(_HostBatch(group, arrays, hosts[0] if hosts else None))
        tensors = self._copy(arrays)
        first, *others = (self._gpu_batch(host, tensors, group) for group, host in enumerate(hosts))
        self._latest = replace(first, other_groups=tuple(others)) if others else first
        return self._latest

    def advance(self, batch: AttentionBatch, *, after: GpuBatch, block_size: int) -> GpuBatch:
        """Return the numbers of a batch of decodes that is `after` advanced by one token.

        They are advanced in place, or uploaded if another step has overwritten them.
        """
        if self._latest is not after or after.decodes is None:
            return self.upload(batch)
        first, *others = (
            self._advanced(host, before, group, block_size)
            for group, (host, before) in enumerate(zip(batch.groups, after.groups, strict=True))
        )
        self._latest = replace(first, other_groups=tuple(others))
        return self._latest

    def _advanced(
        self, batch: AttentionBatch, after: GpuBatch, group: int, block_size: int
    ) -> GpuBatch:
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.advance import advance

        before = after.decodes
        assert before is not None
        assert before.block_tables is not None
        # The padding of a graph has no keys, and is not advanced.
        advance(before.seq_lens, after.slot_mapping, before.block_tables, block_size=block_size)
        decodes = replace(
            before,
            host_seq_lens=batch.seq_lens,
            max_seq_len=self._max_seq_len(batch.seq_lens, group),
            has_no_context=False,
        )
        return replace(after, decodes=decodes)

    def _gpu_batch(self, host: _HostBatch, tensors: list[torch.Tensor], group: int) -> GpuBatch:
        prefills, decodes, cross_prefills, cross_decodes, encoders = (
            None if part is None else self._sub_batch(part, tensors, group)
            for part in host.sub_batches
        )
        if decodes is not None and host.batch.max_excess:
            decodes = replace(decodes, max_excess=host.batch.max_excess)
        has_encoder = host.batch.encoder is not None
        return GpuBatch(
            prefills=prefills,
            decodes=decodes,
            cross_prefills=cross_prefills,
            cross_decodes=cross_decodes,
            encoders=encoders,
            slot_mapping=tensors[host.index],
            encoder_slot_mapping=tensors[host.index + 1] if has_encoder else None,
            num_padding=host.batch.num_padding,
        )

    def _max_seq_len(self, seq_lens: _Ints, group: int) -> int:
        if self._max_seq_lens is not None:
            return self._max_seq_lens[group]
        return int(seq_lens.max(initial=0))

    def _sub_batch(self, part: _HostSubBatch, tensors: list[torch.Tensor], group: int) -> SubBatch:
        starts, lens = tensors[part.queries.index], tensors[part.index]
        tables = None if part.block_tables is None else tensors[part.index + 1]
        return SubBatch(
            first_token=part.first_token,
            num_tokens=part.queries.num_tokens,
            query_lens=part.query_lens,
            host_seq_lens=part.seq_lens,
            host_block_tables=part.block_tables,
            query_starts=starts,
            seq_lens=lens,
            block_tables=tables,
            max_query_len=part.queries.max_len,
            max_seq_len=self._max_seq_len(part.seq_lens, group),
            has_no_context=part.has_no_context,
        )

    def _copy(self, arrays: Sequence[_Array]) -> list[torch.Tensor]:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        offsets = list(accumulate(sizes, initial=0))
        num_words = offsets[-1] // _WORD_BYTES
        if num_words > len(self._on_device):
            capacity = 1 << (num_words - 1).bit_length()
            self._on_device = torch.empty(capacity, dtype=torch.int64, device=self._device)
        with self._pinned.next_buffer(num_words) as words:
            host = words.numpy().view(np.uint8)
            for array, offset in zip(arrays, offsets, strict=False):
                host[offset : offset + array.nbytes] = (
                    np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                )
            copy_from_host(self._on_device[:num_words], words)
        # A larger buffer has another layout, too.
        layout = [(array.shape, array.dtype) for array in arrays]
        if layout != self._layout:
            self._layout = layout
            on_device = self._on_device.view(torch.uint8)
            self._tensors = [
                on_device[offset : offset + array.nbytes]
                .view(torch.int64 if array.dtype == np.int64 else torch.int32)
                .view(array.shape)
                for array, offset in zip(arrays, offsets, strict=False)
            ]
        return self._tensors


class _Queries:
    """The queries of adjacent sequences, the same in all groups of layers."""

    def __init__(self, arrays: list[_Array], query_lens: _Ints) -> None:
        self.index = len(arrays)
        """Index of the starts."""
        self.num_tokens = int(query_lens.sum())
        self.max_len = int(query_lens.max(initial=0))
        starts = np.zeros(len(query_lens) + 1, dtype=np.int32)
        np.cumsum(query_lens, out=starts[1:])
        arrays.append(starts)


class _HostSubBatch:
    """Adjacent sequences of a batch on the host, and the index of their arrays."""

    def __init__(
        self,
        arrays: list[_Array],
        first_token: int,
        query_lens: _Ints,
        seq_lens: _Ints,
        block_tables: _Ints | None,
        of_first_group: _HostSubBatch | None = None,
    ) -> None:
        self.first_token = first_token
        self.query_lens = query_lens
        self.seq_lens = seq_lens
        self.block_tables = block_tables
        if of_first_group is None:
            self.queries = _Queries(arrays, query_lens)
            self.has_no_context = bool((query_lens == seq_lens).all())
        else:
            self.queries = of_first_group.queries
            self.has_no_context = of_first_group.has_no_context
        self.index = len(arrays)
        """Index of the lengths; the tables follow, if any."""
        arrays.append(seq_lens)
        if block_tables is not None:
            arrays.append(block_tables)


class _HostBatch:
    """A batch on the host, and the index of its arrays."""

    def __init__(
        self, batch: AttentionBatch, arrays: list[_Array], first_group: _HostBatch | None
    ) -> None:
        """Append the arrays to upload to `arrays`, without arrays of the given first group."""
        self.batch = batch
        self.index = len(arrays)
        """Index of the slots; the slots of the encoder follow, if any."""
        encoder = batch.encoder
        arrays.append(batch.slot_mapping)
        if encoder is not None:
            arrays.append(encoder.slot_mapping)
        self.sub_batches: list[_HostSubBatch | None] = [None] * 5
        first, total = batch.num_prefills, len(batch.query_lens)
        first_tokens = (0, batch.num_prefill_tokens)
        for index, part in enumerate((slice(0, first), slice(first, total))):
            if part.start == part.stop:
                continue
            query_lens = batch.query_lens[part]
            self.sub_batches[index] = _HostSubBatch(
                arrays,
                first_tokens[index],
                query_lens,
                # The whole array itself shows which groups have the same lengths.
                batch.seq_lens if first == 0 else batch.seq_lens[part],
                batch.block_tables[part],
                None if first_group is None else first_group.sub_batches[index],
            )
            if encoder is not None:
                self.sub_batches[2 + index] = _HostSubBatch(
                    arrays,
                    first_tokens[index],
                    query_lens,
                    encoder.seq_lens[part],
                    encoder.block_tables[part],
                )
        if encoder is not None and (is_run := encoder.query_lens > 0).any():
            lens = encoder.query_lens[is_run]
            self.sub_batches[4] = _HostSubBatch(arrays, 0, lens, lens, None)


class PinnedRing:
    """A ring of buffers: the host fills a buffer while the GPU still reads others."""

    def __init__(self, device: torch.device, *, num_buffers: int = 2) -> None:
        """Memory is allocated when it is needed; that of a CPU `device` is not pinned."""
        self._is_cuda = device.type == "cuda"
        self._turn = 0
        self._buffers = [torch.empty(0, dtype=torch.int64)] * num_buffers
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers

    @contextmanager
    def next_buffer(self, num_words: int) -> Iterator[torch.Tensor]:
        """Yield `num_words` int64 on the host; launch the readers of the buffer within the context.

        Waits only if the GPU has not yet run the readers of this buffer's last turn.
        """
        turn = self._turn
        self._turn = (turn + 1) % len(self._buffers)
        event = self._events[turn]
        if event is not None:
            event.synchronize()
        if len(self._buffers[turn]) < num_words:
            capacity = 1 << (num_words - 1).bit_length()
            self._buffers[turn] = torch.empty(capacity, dtype=torch.int64, pin_memory=self._is_cuda)
        yield self._buffers[turn][:num_words]
        if self._is_cuda:
            self._events[turn] = event = event or torch.cuda.Event()
            event.record()


def copy_from_host(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy int64 words from pinned memory, without waiting, and without a copy engine on a GPU."""
    if not target.is_cuda:
        target.copy_(source)
        return
    # Imported here so that this module can be imported without Triton.
    from attention.kernels.triton.pinned_copy import copy_words

    copy_words(target, source)

"""A small engine around one backend: sequences, blocks, and steps that are checked.

Each sequence remembers every key and value that it was ever given, so that each step's output
can be compared with the dense reference. The cache starts as NaN, and so do freed blocks, also
those behind the window of a group of layers.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attention.abstract import (
    AttentionBackend,
    AttentionBatch,
    AttentionParams,
    AttentionSpec,
    AttentionType,
    EncoderBatch,
)
from attention.cpu.torch_sdpa import TorchSDPABackend, TorchSDPAMetadataBuilder
from attention.layer import Attention
from attention.params import storage_dtype
from pagedray.layout import CacheLayout
from tests.attention.dense_reference import as_cached, dense_attention, relative_error, sinks_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}
# Both fp8 types read this byte as NaN.
_NAN_BYTE = 0x7F
_FREED = -1
"""In place of a block behind the window."""


def params_of(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    has_alibi: bool = False,
    has_sinks: bool = False,
    fp8: str = "auto",
    attention_type: AttentionType = AttentionType.DECODER,
) -> AttentionParams:
    """Return parameters with slopes and fp8 scales that no formula would guess, if any."""
    slopes = tuple(0.03 + 0.2 / (1 + i) for i in range(num_heads)) if has_alibi else None
    return AttentionParams(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=slopes,
        has_sinks=has_sinks,
        kv_cache_dtype=fp8,
        k_scale=1.0 if fp8 == "auto" else 0.037,
        v_scale=1.0 if fp8 == "auto" else 0.71,
        attention_type=attention_type,
    )


@dataclass(eq=False)
class RigSequence:
    """One sequence: its blocks, and per layer all keys and values so far."""

    blocks: list[int] = field(default_factory=list)
    other_blocks: list[list[int]] = field(default_factory=list)
    """Of each group of layers after the first."""
    length: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    num_encoder_tokens: int = 0
    encoder_blocks: list[int] = field(default_factory=list)
    is_encoded: bool = False
    """Whether its encoder ran."""

    @property
    def tables(self) -> list[list[int]]:
        """Return the blocks of each group."""
        return [self.blocks, *self.other_blocks]


class Rig:
    """Runs steps of some layers over one cache and checks each of them."""

    uses_kernel = True
    """Whether decodes go to the kernel, where there is one, or through torch."""

    def __init__(
        self,
        *layers: AttentionParams,
        backend: type[AttentionBackend] = TorchSDPABackend,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        num_blocks: int = 96,
        seed: int = 0,
        device: str = "cpu",
        layout: CacheLayout | None = None,
        is_grouped: bool = False,
    ) -> None:
        """`is_grouped` has the groups of a rank, if there is no `layout`."""
        self.backend = backend
        spec = self.spec_of(*layers, dtype=dtype, block_size=block_size, device=device)
        self.spec = spec.grouped() if is_grouped else replace(spec, layout=layout)
        assert backend.check(self.spec) == ()
        self.layers = [
            Attention(params, layer_index=i, backend=backend, sinks=sinks_of(params, device))
            for i, params in enumerate(layers)
        ]
        self.builder: Any = (  # Any: tests look into the builders of their own backends
            TorchSDPAMetadataBuilder(self.spec, use_kernel=self.uses_kernel)
            if backend is TorchSDPABackend
            else backend.make_metadata_builder(self.spec)
        )
        shape = num_blocks, *self.spec.block_shape
        cache_dtype = storage_dtype(self.spec.cache_dtype)
        self.nan = _NAN_BYTE if cache_dtype == torch.uint8 else float("nan")
        self.cache = torch.full(shape, self.nan, dtype=cache_dtype, device=device)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(num_blocks, generator=self.generator).tolist()
        self.poisoned = self.free.pop()
        self.num_sharing = Counter[int]()
        """Of each block with forks, how many sequences have it beside the first."""
        self.magnitude = 1.0
        self.worst_error = 0.0
        """The largest so far, as `relative_error` has it."""

    @staticmethod
    def spec_of(
        *layers: AttentionParams, dtype: torch.dtype, block_size: int, device: str
    ) -> AttentionSpec:
        """Return what a rig with these arguments asks of its backend."""
        return AttentionSpec(
            layers=layers, dtype=dtype, device=torch.device(device), block_size=block_size
        )

    def random(self, *shape: int) -> torch.Tensor:
        """Return normal numbers of the model's dtype."""
        numbers = torch.randn(shape, generator=self.generator) * self.magnitude
        return numbers.to(self.spec.dtype)

    def tokens(self, count: int) -> list[torch.Tensor]:
        """Return random projections of tokens, for each layer."""
        return [
            self.random(count, (params.num_heads + 2 * params.num_kv_heads) * params.head_size)
            for params in self.spec.layers
        ]

    def sequence(self, num_encoder_tokens: int = 0) -> RigSequence:
        """Return a sequence without tokens of the decoder."""
        empty = [
            torch.empty(0, params.num_kv_heads, params.head_size, dtype=self.spec.dtype)
            for params in self.spec.layers
        ]
        return RigSequence(
            other_blocks=[[] for _ in self.spec.group_windows[1:]],
            keys=list(empty),
            values=list(empty),
            num_encoder_tokens=num_encoder_tokens,
        )

    def fork(self, parent: RigSequence) -> RigSequence:
        """Return a copy that shares all full blocks and has its own copy of the last one."""
        shared = parent.length // self.spec.block_size
        tables = [table[:shared] for table in parent.tables]
        for table, blocks in zip(parent.tables, tables, strict=True):
            self.num_sharing.update(block for block in blocks if block != _FREED)
            if parent.length % self.spec.block_size:
                blocks.append(self.free.pop())
                self.backend.copy_blocks(self.cache, [(table[shared], blocks[-1])])
        return replace(
            parent,
            blocks=tables[0],
            other_blocks=tables[1:],
            keys=list(parent.keys),
            values=list(parent.values),
        )

    def release(self, sequence: RigSequence) -> None:
        """Free the blocks of a sequence, with NaN in them."""
        for blocks in (*sequence.tables, sequence.encoder_blocks):
            self._free_blocks(list(blocks), len(blocks))
        sequence.blocks, sequence.encoder_blocks = [], []
        sequence.other_blocks = [[] for _ in sequence.other_blocks]

    def _free_blocks(self, blocks: list[int], end: int) -> None:
        """Free the blocks before an entry that no other sequence has, with NaN in them."""
        for entry, block in enumerate(blocks[:end]):
            if block == _FREED:
                continue
            blocks[entry] = _FREED
            if self.num_sharing[block]:
                self.num_sharing[block] -= 1
            else:
                self.cache[block] = self.nan
                self.free.append(block)

    def slots(self, blocks: Sequence[int], start: int, stop: int) -> list[int]:
        """Return the slots of a run of positions."""
        size = self.spec.block_size
        return [blocks[p // size] * size + p % size for p in range(start, stop)]

    def batch(
        self,
        prefills: Sequence[tuple[RigSequence, int]],
        decodes: Sequence[RigSequence],
        num_padding: int = 0,
    ) -> AttentionBatch:
        """Return the batch that gives each prefill so many more tokens and each decode one."""
        work = [*prefills, *((sequence, 1) for sequence in decodes)]
        first, *others = (
            self._group_batch(group, len(prefills), work, num_padding)
            for group in range(len(self.spec.group_windows))
        )
        encoder = self._encoder_batch([sequence for sequence, _ in work])
        return replace(first, encoder=encoder, other_groups=tuple(others))

    def _group_batch(
        self,
        group: int,
        num_prefills: int,
        work: Sequence[tuple[RigSequence, int]],
        num_padding: int,
    ) -> AttentionBatch:
        slots: list[int] = []
        seq_lens: list[int] = []
        tables: list[list[int]] = []
        for sequence, count in work:
            table, length = sequence.tables[group], sequence.length
            self._extend(table, length + count)
            slots += self.slots(table, length, length + count)
            num_dead = self._num_dead(group, length)
            tables.append(table[num_dead:])
            seq_lens.append(length + count - num_dead * self.spec.block_size)
            assert _FREED not in tables[-1]
        return AttentionBatch(
            num_prefills=num_prefills,
            query_lens=np.array([count for _, count in work], dtype=np.int32),
            seq_lens=np.array(seq_lens, dtype=np.int32),
            block_tables=self._tables(tables),
            slot_mapping=np.array(slots + [-1] * num_padding, dtype=np.int64),
        )

    def _num_dead(self, group: int, length: int) -> int:
        """Return how many blocks are behind the window of a query at this position."""
        window = self.spec.group_windows[group]
        return 0 if window is None else max(0, length - window + 1) // self.spec.block_size

    def step(
        self,
        prefills: Sequence[tuple[RigSequence, int]] = (),
        decodes: Sequence[RigSequence] = (),
        num_padding: int = 0,
        tokens: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Run one step through every layer, check it, and return each layer's output.

        `tokens` is what each layer's projection gives, `random` if it is None. A sequence runs
        its encoder in its first step.
        """
        batch = self.batch(prefills, decodes, num_padding)
        metadata = self.builder.build(batch)
        work = [*prefills, *((sequence, 1) for sequence in decodes)]
        counts = [count for _, count in work]
        encoder_counts = [0 if s.is_encoded else s.num_encoder_tokens for s, _ in work]
        outputs = []
        for i, layer in enumerate(self.layers):
            params = layer.params
            kind = params.attention_type
            num_queries = counts if kind is not AttentionType.ENCODER else encoder_counts
            num_keys = num_queries
            padding = num_padding if kind is not AttentionType.ENCODER else 0
            if kind is AttentionType.ENCODER_DECODER:
                num_keys = encoder_counts
            query, key, value = self._project(
                params,
                sum(num_queries) + padding,
                sum(num_keys),
                None if tokens is None else tokens[i],
            )
            query[sum(num_queries) :] = float("nan")  # Padding may hold anything.
            has_keys = len(key) or kind is not AttentionType.ENCODER_DECODER
            on_device = [t.to(self.cache.device) for t in (query, key, value)]
            output = layer(
                on_device[0],
                on_device[1] if has_keys else None,
                on_device[2] if has_keys else None,
                self.cache,
                metadata,
            )
            outputs.append(output.cpu())
            assert (outputs[-1][sum(num_queries) :] == 0).all()
            assert len(outputs[-1]) == sum(num_queries) + padding
            self._remember(i, [s for s, _ in work], num_keys, key, value)
            self._check(i, [s for s, _ in work], num_queries, query, outputs[-1])
        for sequence, count in work:
            self.advance(sequence, count)
            sequence.is_encoded = True
        return outputs

    def advance(self, sequence: RigSequence, num_tokens: int = 1) -> None:
        """Count tokens that a step has computed, and free the blocks behind the windows."""
        sequence.length += num_tokens
        for group, table in enumerate(sequence.tables):
            self._free_blocks(table, self._num_dead(group, sequence.length))

    def _project(
        self,
        params: AttentionParams,
        num_queries: int,
        num_keys: int,
        fused: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, whose rows are strided as models have them."""
        q_size = params.num_heads * params.head_size
        kv_size = params.num_kv_heads * params.head_size
        if params.attention_type is AttentionType.ENCODER_DECODER:
            fused = self.random(num_keys, 2 * kv_size)
            key, value = fused.split(kv_size, 1)
            return self.random(num_queries, q_size), key, value
        if fused is None:
            fused = self.random(num_queries, q_size + 2 * kv_size)
        query, key, value = fused.split([q_size, kv_size, kv_size], 1)
        return query, key, value

    def _remember(
        self,
        layer: int,
        sequences: Sequence[RigSequence],
        counts: Sequence[int],
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        params = self.spec.layers[layer]
        shape = (-1, params.num_kv_heads, params.head_size)
        start = 0
        for sequence, count in zip(sequences, counts, strict=True):
            rows = slice(start, start + count)
            keys = as_cached(key[rows].reshape(shape), params, params.k_scale)
            values = as_cached(value[rows].reshape(shape), params, params.v_scale)
            sequence.keys[layer] = torch.cat([sequence.keys[layer], keys])
            sequence.values[layer] = torch.cat([sequence.values[layer], values])
            start += count

    def _check(
        self,
        layer: int,
        sequences: Sequence[RigSequence],
        counts: Sequence[int],
        query: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        params = self.spec.layers[layer]
        start = 0
        # Each sequence by itself, so that a small one that is wrong cannot hide in the norm.
        for sequence, count in zip(sequences, counts, strict=True):
            rows = slice(start, start + count)
            start += count
            queries = query[rows].reshape(-1, params.num_heads, params.head_size)
            keys, values = sequence.keys[layer], sequence.values[layer]
            reference = dense_attention(queries, keys, values, params).flatten(1)
            error = relative_error(output[rows], reference)
            self.worst_error = max(self.worst_error, error)
            assert error < TOLERANCE[self.spec.dtype], f"layer {layer}: {error}"

    def _encoder_batch(self, sequences: Sequence[RigSequence]) -> EncoderBatch | None:
        kinds = {params.attention_type for params in self.spec.layers}
        if kinds <= {AttentionType.DECODER, AttentionType.ENCODER_ONLY}:
            return None
        slots: list[int] = []
        for sequence in sequences:
            if not sequence.is_encoded:
                self._extend(sequence.encoder_blocks, sequence.num_encoder_tokens)
                slots += self.slots(sequence.encoder_blocks, 0, sequence.num_encoder_tokens)
        lengths = np.array([s.num_encoder_tokens for s in sequences], dtype=np.int32)
        are_encoded = np.array([s.is_encoded for s in sequences], dtype=bool)
        return EncoderBatch(
            query_lens=np.where(are_encoded, np.int32(0), lengths),
            seq_lens=lengths,
            block_tables=self._tables([s.encoder_blocks for s in sequences]),
            slot_mapping=np.array(slots, dtype=np.int64),
        )

    def _extend(self, blocks: list[int], num_tokens: int) -> None:
        """Add free blocks until so many tokens have room."""
        while len(blocks) * self.spec.block_size < num_tokens:
            blocks.append(self.free.pop())

    def _tables(self, blocks: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
        width = max(map(len, blocks), default=0) + 1
        # Tables are padded with the id of a block of NaN, which must not be read.
        tables = np.full((len(blocks), width), self.poisoned, dtype=np.int32)
        for row, ids in zip(tables, blocks, strict=True):
            row[: len(ids)] = ids
        return tables


def check_chunks(rig: Rig, chunks: tuple[int, ...]) -> None:
    """Check that a prompt in chunks has the outputs and the cache of the whole prompt."""
    num_tokens = sum(chunks)
    tokens = rig.tokens(num_tokens)
    whole, parts = rig.sequence(), rig.sequence()
    expected = rig.step(prefills=[(whole, num_tokens)], tokens=tokens)
    outputs = []
    for count in chunks:
        rows = slice(parts.length, parts.length + count)
        outputs.append(rig.step(prefills=[(parts, count)], tokens=[t[rows] for t in tokens]))
    for layer, reference in enumerate(expected):
        assert relative_error(torch.cat([o[layer] for o in outputs]), reference) < 1e-5
    assert torch.equal(rig.cache[parts.blocks], rig.cache[whole.blocks])

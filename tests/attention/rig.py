"""A small engine around one backend: sequences, blocks, and steps that are checked.

Each sequence remembers every key and value that it was ever given, so that each step's output
can be compared with the dense reference. The cache starts as NaN, and so do freed blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from attention.abstract import AttentionBatch, AttentionParams, AttentionSpec
from attention.layer import Attention
from attention.torch_sdpa_backend import TorchSDPABackend, TorchSDPAMetadataBuilder
from tests.attention.dense_reference import dense_attention, relative_error

__all__ = ["TOLERANCE", "Rig", "RigSequence", "params_of"]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 4e-3}


def params_of(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int = 16,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    has_alibi: bool = False,
) -> AttentionParams:
    """Return parameters with slopes that no formula would guess, if any."""
    slopes = tuple(0.03 + 0.2 / (1 + i) for i in range(num_heads)) if has_alibi else None
    return AttentionParams(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        scale=head_size**-0.5 if scale is None else scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        alibi_slopes=slopes,
    )


@dataclass(eq=False)
class RigSequence:
    """One sequence: its blocks, and per layer all keys and values so far."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)


class Rig:
    """Runs steps of some layers over one cache and checks each of them."""

    uses_kernel = True
    """Whether decodes go to the kernel, where there is one, or through torch."""

    def __init__(
        self,
        *layers: AttentionParams,
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        num_blocks: int = 96,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.spec = AttentionSpec(
            layers=layers, dtype=dtype, device=torch.device(device), block_size=block_size
        )
        assert TorchSDPABackend.check(self.spec) == ()
        self.layers = [
            Attention(params, layer_index=i, backend=TorchSDPABackend)
            for i, params in enumerate(layers)
        ]
        self.builder = TorchSDPAMetadataBuilder(self.spec, use_kernel=self.uses_kernel)
        shape = TorchSDPABackend.get_kv_cache_shape(
            num_blocks=num_blocks,
            num_layers=len(layers),
            block_size=block_size,
            num_kv_heads=layers[0].num_kv_heads,
            head_size=layers[0].head_size,
        )
        self.cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = torch.randperm(num_blocks, generator=self.generator).tolist()
        self.poisoned = self.free.pop()
        self.magnitude = 1.0

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

    def sequence(self) -> RigSequence:
        """Return a sequence without tokens."""
        empty = [
            torch.empty(0, params.num_kv_heads, params.head_size, dtype=self.spec.dtype)
            for params in self.spec.layers
        ]
        return RigSequence(keys=list(empty), values=list(empty))

    def fork(self, parent: RigSequence) -> RigSequence:
        """Return a copy that shares all full blocks and has its own copy of the last one."""
        shared = parent.length // self.spec.block_size
        blocks = parent.blocks[:shared]
        if parent.length % self.spec.block_size:
            blocks.append(self.free.pop())
            TorchSDPABackend.copy_blocks(self.cache, [(parent.blocks[shared], blocks[-1])])
        return RigSequence(blocks, parent.length, list(parent.keys), list(parent.values))

    def release(self, sequence: RigSequence) -> None:
        """Free the blocks of a sequence, with NaN in them."""
        self.cache[sequence.blocks] = float("nan")
        self.free += sequence.blocks
        sequence.blocks = []

    def slots(self, sequence: RigSequence, start: int, stop: int) -> list[int]:
        """Return the slots of a run of positions."""
        size = self.spec.block_size
        return [sequence.blocks[p // size] * size + p % size for p in range(start, stop)]

    def batch(
        self,
        prefills: Sequence[tuple[RigSequence, int]],
        decodes: Sequence[RigSequence],
        num_padding: int = 0,
    ) -> AttentionBatch:
        """Return the batch that gives each prefill so many more tokens and each decode one."""
        work = [*prefills, *((sequence, 1) for sequence in decodes)]
        slots: list[int] = []
        for sequence, count in work:
            while len(sequence.blocks) * self.spec.block_size < sequence.length + count:
                sequence.blocks.append(self.free.pop())
            slots += self.slots(sequence, sequence.length, sequence.length + count)
        width = max((len(sequence.blocks) for sequence, _ in work), default=0) + 1
        # What pads a table is the id of a block that holds NaN: no one may look at it.
        tables = np.full((len(work), width), self.poisoned, dtype=np.int32)
        for row, (sequence, _) in zip(tables, work, strict=True):
            row[: len(sequence.blocks)] = sequence.blocks
        return AttentionBatch(
            num_prefills=len(prefills),
            query_lens=np.array([count for _, count in work], dtype=np.int32),
            seq_lens=np.array([s.length + count for s, count in work], dtype=np.int32),
            block_tables=tables,
            slot_mapping=np.array(slots + [-1] * num_padding, dtype=np.int64),
        )

    def step(
        self,
        prefills: Sequence[tuple[RigSequence, int]] = (),
        decodes: Sequence[RigSequence] = (),
        num_padding: int = 0,
        tokens: Sequence[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Run one step through every layer, check it, and return each layer's output.

        `tokens` is what each layer's projection gives, `random` if it is None.
        """
        batch = self.batch(prefills, decodes, num_padding)
        metadata = self.builder.build(batch)
        work = [*prefills, *((sequence, 1) for sequence in decodes)]
        outputs = []
        for i, layer in enumerate(self.layers):
            params = layer.params
            num_tokens = len(batch.slot_mapping)
            # One fused projection, as models have it: the rows of q, k and v are strided.
            q_size = params.num_heads * params.head_size
            kv_size = params.num_kv_heads * params.head_size
            fused = self.random(num_tokens, q_size + 2 * kv_size) if tokens is None else tokens[i]
            fused[num_tokens - num_padding :] = float("nan")  # Padding may hold anything.
            query, key, value = fused.to(self.cache.device).split([q_size, kv_size, kv_size], 1)
            output = layer(query, key, value, self.cache, metadata)
            outputs.append(output.cpu())
            self._check(i, work, fused, outputs[-1], num_padding)
        for sequence, count in work:
            sequence.length += count
        return outputs

    def _check(
        self,
        layer: int,
        work: Sequence[tuple[RigSequence, int]],
        fused: torch.Tensor,
        output: torch.Tensor,
        num_padding: int,
    ) -> None:
        params = self.spec.layers[layer]
        kv_heads = params.num_kv_heads
        heads = fused.view(len(fused), params.num_heads + 2 * kv_heads, params.head_size)
        query, key, value = heads.split([params.num_heads, kv_heads, kv_heads], dim=1)
        references = []
        start = 0
        for sequence, count in work:
            rows = slice(start, start + count)
            sequence.keys[layer] = torch.cat([sequence.keys[layer], key[rows]])
            sequence.values[layer] = torch.cat([sequence.values[layer], value[rows]])
            references.append(
                dense_attention(
                    query[rows], sequence.keys[layer], sequence.values[layer], params
                ).flatten(1)
            )
            start += count
        assert (output[start:] == 0).all()
        assert len(output) == start + num_padding
        # Each sequence by itself, so that a small one that is wrong cannot hide in the norm.
        parts = output[:start].split([count for _, count in work])
        for part, reference in zip(parts, references, strict=True):
            error = relative_error(part, reference)
            assert error < TOLERANCE[self.spec.dtype], f"layer {layer}: {error}"

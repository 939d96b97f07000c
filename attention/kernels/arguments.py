"""The records that kernels take in place of single tensors, and the number of multiprocessors."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "CHUNK_SIZE",
    "NUM_ITEM_WORDS",
    "DecodeItems",
    "DecodeScratch",
    "DeferredRMSNorm",
    "DeltaGates",
    "ExpertWeights",
    "GatedNorm",
    "NewTokens",
    "QuantizedRows",
    "Rotary",
    "RuleTokens",
    "ScanGates",
    "Segments",
    "SplitKPartials",
    "num_multiprocessors",
]

CHUNK_SIZE = 64
"""Tokens per chunk of a recurrent layer; chunks begin at multiples of this number."""
NUM_ITEM_WORDS = 4
"""Words of an item before its rows, and of each of its rows."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Inputs of a product in float8_e4m3fn, each row with a scale to multiply the row by."""

    values: torch.Tensor
    """`[num_rows, size]` float8_e4m3fn."""
    scales: torch.Tensor
    """`[num_rows, 1]` float32."""
    dtype: torch.dtype
    """The dtype of the rows before quantization, and of products with the rows."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class DeferredRMSNorm:
    """A row of the residual stream; the product that reads the row computes its RMSNorm."""

    stream: torch.Tensor
    """`[1, size]`."""
    weight: torch.Tensor
    """`[size]`, of the stream's dtype or float32."""
    eps: float

    def __len__(self) -> int:
        return len(self.stream)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowConv:
    """A causal convolution with SiLU of some columns of a product, for one token of one sequence.

    The product that computes the columns also updates the state.
    """

    first_column: int
    """The first channel; the other channels are in the columns behind it."""
    weight: torch.Tensor
    """`[num_channels, width]`."""
    bias: torch.Tensor | None
    """`[num_channels]`."""
    states: torch.Tensor
    """`[num_rows, width - 1, num_channels]`."""
    rows: torch.Tensor
    """The row of the state, int32 `[1]`; -1 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class SplitKPartials:
    """The parts of a product with divided inputs; the rows are the sum of the parts."""

    parts: torch.Tensor
    """`[num_parts, num_rows, size]` float32, contiguous."""

    def whole(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, `[num_rows, size]`."""
        return self.parts.sum(0).to(dtype)


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embeddings of some tokens."""

    positions: torch.Tensor
    """`[num_tokens]` int64."""
    table: torch.Tensor
    """`[num_positions, head_size]` float32: cosines, then sines, of each pair.

    Element i of a head is paired with i + head_size / 2.
    """

    def select(self, indices: torch.Tensor) -> Rotary:
        """Return the entries of some tokens, `[num_selected]` int64."""
        return Rotary(self.positions.index_select(0, indices), self.table)

    def split(self, sizes: Sequence[int]) -> list[Rotary]:
        """Split the entries into adjacent groups of tokens, given the sizes of the groups."""
        return [Rotary(positions, self.table) for positions in self.positions.split(sizes)]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens of a decode, before rotation of their queries and keys and the cache write."""

    key: torch.Tensor
    """`[num_tokens, num_kv_heads, head_size]`; tokens may be strided, and so in `value`."""
    value: torch.Tensor
    slots: torch.Tensor
    """Cache slots, `[num_tokens]` int64; -1 for tokens that are not written."""
    rotary: Rotary

    @property
    def layouts(self) -> tuple[tuple[int, ...], ...]:
        """The strides of keys and values."""
        return self.key.stride(), self.value.stride()


@dataclass(frozen=True, slots=True, eq=False)
class DecodeScratch:
    """Memory of the decodes that are launched on one stream, for all of their layers."""

    parts: torch.Tensor
    """float32, of at least `(head_size + 1) * num_heads` elements for each part: the results of all
    parts, `[num_parts, num_heads, head_size]`, then their logarithms of sums."""
    arrivals: torch.Tensor
    """Parts of each row and KV head that are there, int32 of at least `num_rows * num_kv_heads`;
    zero before and after every launch."""


@dataclass(frozen=True, slots=True, eq=False)
class DecodeItems:
    """The work of one step: rows, each a sequence, and the items among which it is divided.

    An item is a range of keys that some rows see, all of them in the blocks of the first.
    """

    words: torch.Tensor
    """`[num_items, NUM_ITEM_WORDS * (1 + rows_per_item)]` int32. Of an item: number of rows, 0 for
    an item without work; first tile of keys; tile behind the last; which part of each row's result
    this is. Of each of its rows: the row; number of keys; first part in the scratch memory; number
    of parts. The item of a row of one part writes the result, and the parts of others are merged.
    """
    max_parts: int
    """Parts for which there is scratch memory."""
    scratch: DecodeScratch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SigmoidScores:
    """How experts are chosen by the sigmoids of a router's logits."""

    bias: torch.Tensor | None
    """Added to choose experts, but not to their weights; float32 `[num_experts]`, or None."""
    scale: float = 1.0
    """Multiplies the weights of chosen experts."""
    sum_eps: float = 0.0
    """Added to the sum that renormalized weights are divided by."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """The weights of a rank's experts, all contiguous.

    With scales, both projections are in mxfp4, as `packed_mxfp4` returns them.
    """

    first_expert: int
    """The first expert of this rank; experts of other ranks add nothing."""
    gate_up: torch.Tensor
    """`[num_experts, num_columns, hidden_size]`: gate, if experts have one, and up projection."""
    down: torch.Tensor
    """`[num_experts, hidden_size, inner_size]`."""
    gate_up_scales: torch.Tensor | None = None
    """The exponents of blocks of 32 inputs, uint8 `[num_experts, hidden_size / 32, num_columns]`.
    """
    down_scales: torch.Tensor | None = None
    """The same, `[num_experts, inner_size / 32, hidden_size]`."""
    gate_up_bias: torch.Tensor | None = None
    """`[num_experts, num_columns]`."""
    down_bias: torch.Tensor | None = None
    """`[num_experts, hidden_size]`."""
    clamp: tuple[float, float] | None = None
    """The alpha and the limit of a `ClampedGate`, or None."""
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    """The activation of other gates; experts with `relu2` have no gate."""

    @property
    def gate(self) -> Literal["silu", "gelu_tanh", "relu2", "clamped"]:
        """The kind of gate."""
        return self.activation if self.clamp is None else "clamped"

    @property
    def num_experts(self) -> int:
        """Experts of this rank."""
        return len(self.gate_up)

    @property
    def num_columns(self) -> int:
        """Columns of the gate and the up projection of each expert."""
        return self.gate_up.shape[1]

    @property
    def inner_size(self) -> int:
        """Columns of each expert on this rank."""
        return self.num_columns if self.gate == "relu2" else self.num_columns // 2

    @property
    def is_mxfp4(self) -> bool:
        """Whether weights are in mxfp4, with scales."""
        return self.gate_up_scales is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of all weights and biases."""
        tensors = (
            *(self.gate_up, self.gate_up_scales, self.gate_up_bias),
            *(self.down, self.down_scales, self.down_bias),
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """The tokens of a step by sequence, and where the state of each sequence is.

    If each segment of several tokens begins at a multiple of `CHUNK_SIZE` of its sequence, results
    do not depend on how a sequence was divided into segments, to the bit.
    """

    query_starts: torch.Tensor
    """The first token of each segment, and the end of the last, `[num_segments + 1]` int32."""
    rows: torch.Tensor
    """The row of each segment in the states, `[num_segments]` int32, unique; -1 for padding, which
    reads and writes no state and has results of 0."""
    max_query_len: int
    """An upper bound of the tokens of a segment; 1 is a decode."""
    num_prompts: int | None = None
    """An upper bound of the segments of several tokens, which are the first; None if all may be."""
    save_ends: torch.Tensor | None = None
    """Tokens before which states are saved, `[num_spares]` int32, -1 for none. Each is within a
    segment of several tokens, a multiple of `CHUNK_SIZE` behind its first. The last `num_spares`
    states are the spare states, to which they are saved."""
    is_chained: bool = False
    """Whether the tokens of each segment are computed one after another, with the results of as
    many steps of decodes. There are no saves then."""
    keeps_states: bool = False
    """Whether the states stay as they are before these tokens; all segments are chained then."""

    @property
    def num_spares(self) -> int:
        """The number of spare states."""
        return 0 if self.save_ends is None else len(self.save_ends)

    @property
    def max_prompts(self) -> int:
        """The number of the first segments that may have several tokens."""
        num_segments = len(self.rows)
        return num_segments if self.num_prompts is None else min(self.num_prompts, num_segments)

    def spans(self) -> list[tuple[int, int, int]]:
        """Return the row, the first token and the end of each segment that has a row and tokens."""
        starts = self.query_starts.tolist()
        spans = zip(self.rows.tolist(), starts, starts[1:], strict=False)
        return [(row, first, end) for row, first, end in spans if row >= 0 and first < end]

    def parts(self) -> Iterator[tuple[slice, Segments, int, int]]:
        """Yield the tokens up to each save, their segments, the row and the index of a spare state.

        The tokens behind the last save are the last part, with row -1.
        """
        ends = [] if self.save_ends is None else self.save_ends.tolist()
        starts = self.query_starts.tolist()
        first = 0
        for end, spare in sorted((end, spare) for spare, end in enumerate(ends) if end >= 0):
            row = self.rows[bisect_left(starts, end) - 1].item()
            yield slice(first, end), self._part(first, end), int(row), spare
            first = end
        yield slice(first, None), self._part(first, starts[-1]), -1, -1

    def accepted(self, token_ids: torch.Tensor, sampled_ids: torch.Tensor) -> Segments:
        """Return the tokens of each chain up to the last right draft, which advance its state.

        `token_ids` are the tokens, and `sampled_ids` the tokens sampled after each, `[num_tokens]`.
        The tokens behind a wrong draft become padding. Does not wait for the device.
        """
        starts = self.query_starts
        places = torch.arange(len(token_ids), dtype=torch.int32, device=starts.device)
        owners = torch.searchsorted(starts[1:], places, right=True)
        # Whether the first token of a chain was sampled before does not matter.
        num_wrong = token_ids.ne(sampled_ids.roll(1)).cumsum(0)
        is_accepted = num_wrong == num_wrong[starts[owners]]
        num_accepted = torch.zeros_like(self.rows).index_add_(0, owners, is_accepted.int())
        ends = torch.stack((starts[:-1], starts[:-1] + num_accepted), dim=1).flatten()
        rows = torch.stack((self.rows, torch.full_like(self.rows, -1)), dim=1).flatten()
        ends = torch.cat((ends, starts[-1:]))
        return replace(self, query_starts=ends, rows=rows, keeps_states=False)

    def _part(self, first: int, end: int) -> Segments:
        """Return the segments of some of the tokens, without saves."""
        starts = self.query_starts.clamp(first, end) - first
        return replace(self, query_starts=starts, save_ends=None)


class RuleTokens(NamedTuple):
    """The inputs of a delta rule or of a selective scan, by token."""

    query: torch.Tensor
    """`[num_tokens, num_key_heads, key_size]`, and so is `key`; C and B of a scan."""
    key: torch.Tensor
    value: torch.Tensor
    """`[num_tokens, num_heads, value_size]`; adjacent heads share a key head."""
    log_decay: torch.Tensor
    """`[num_tokens, num_heads]` float32, and so is `factor`."""
    factor: torch.Tensor
    """Betas of a delta rule, or step sizes of a scan."""

    def part(self, tokens: slice) -> RuleTokens:
        """Return the inputs of some tokens."""
        return RuleTokens(*(one[tokens] for one in self))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaGates:
    """The projections from which a gated delta rule computes its gates.

    The logarithm of the decay is `-exp(a_log) * softplus(a + dt_bias)`, and beta is `sigmoid(b)`.
    """

    a: torch.Tensor
    """`[num_tokens, num_value_heads]`; tokens may be strided, and so in `b`."""
    b: torch.Tensor
    a_log: torch.Tensor
    """`[num_value_heads]` float32."""
    dt_bias: torch.Tensor
    """`[num_value_heads]` float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScanGates:
    """The inputs and parameters of a selective scan that are numbers for each head.

    The step size is `softplus(dt + dt_bias)`, and the logarithm of the decay is `-exp(a_log)` times
    the step size.
    """

    dt: torch.Tensor
    """`[num_tokens, num_heads]`; tokens may be strided."""
    a_log: torch.Tensor
    """`[num_heads]` float32, and so are `dt_bias` and `d`."""
    dt_bias: torch.Tensor
    d: torch.Tensor
    """The factor of inputs that are added to the results."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatedNorm:
    """A norm of each head, or group of channels, with a gate: `rms_norm(x) * weight * silu(z)`."""

    z: torch.Tensor
    """`[num_tokens, num_value_heads, head_size]`; tokens may be strided."""
    weight: torch.Tensor
    """`[head_size]`, shared by all heads, or `[num_heads, head_size]`."""
    eps: float


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the streaming multiprocessors of a GPU; 1 for a CPU."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

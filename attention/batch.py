"""The host data of one step, from which a backend's builder makes a plan. Does not know torch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["AttentionBatch", "EncoderBatch"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncoderBatch:
    """The encoder tokens of one step, and where their keys and values are cached.

    Encoder tokens are flat in the order of the sequences, without padding. An encoder runs
    whole, in the step of its sequence's first prefill.
    """

    query_lens: npt.NDArray[np.int32]
    """Encoder tokens computed in this step, `[num_sequences]`; 0 if an earlier step did."""
    seq_lens: npt.NDArray[np.int32]
    """Encoder tokens of each sequence, `[num_sequences]`: the keys that its decoder sees."""
    block_tables: npt.NDArray[np.int32]
    """Blocks of the encoder tokens, right-padded with 0, `[num_sequences, >= max blocks]`."""
    slot_mapping: npt.NDArray[np.int64]
    """Slot of each encoder token that is computed, `[num_encoder_tokens]`."""

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.seq_lens) == len(self.block_tables)
        assert len(self.slot_mapping) == self.query_lens.sum()
        assert ((self.query_lens == 0) | (self.query_lens == self.seq_lens)).all()

    def part(self, first: int, stop: int) -> "EncoderBatch":
        """Return the part that holds the sequences from `first` to `stop`."""
        ends = np.concatenate(([0], np.cumsum(self.query_lens)))
        return EncoderBatch(
            query_lens=self.query_lens[first:stop],
            seq_lens=self.seq_lens[first:stop],
            block_tables=self.block_tables[first:stop],
            slot_mapping=self.slot_mapping[ends[first] : ends[stop]],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """Host data of one step: prefills first, then decodes, then padding.

    Tokens are flat in the order of the sequences. A prefill with a sequence longer than its query
    continues after a cached prefix (a chunk or a prefix hit).
    """

    num_prefills: int
    query_lens: npt.NDArray[np.int32]
    """Tokens computed in this step, `[num_sequences]`; 1 for a decode."""
    seq_lens: npt.NDArray[np.int32]
    """Cached tokens plus computed tokens, `[num_sequences]`; without the tokens of leading blocks
    that the block tables omit."""
    block_tables: npt.NDArray[np.int32]
    """Blocks of each sequence, right-padded with 0, `[num_sequences, >= max blocks]`. Tables of a
    group with a window may omit blocks that no query of the step sees."""
    slot_mapping: npt.NDArray[np.int64]
    """Slot of each token, including padding, `[num_tokens]`; -1 if it is not written."""
    encoder: EncoderBatch | None = None
    """The encoder tokens of the step, for models with an encoder and a decoder."""
    has_chains: bool = False
    """Whether all sequences are decodes, and some see tokens that others compute."""
    excess: Any = None  # Any: this module does not know torch
    """By how much the length of each decode is too large, int64 `[num_sequences]` on the device,
    if only the device knows; None if lengths and slots are exact. No group has a window."""
    max_excess: int = 0
    """An upper bound of the excess, on the host."""
    other_groups: tuple["AttentionBatch", ...] = ()
    """The step in the blocks of each group of layers after the first. Only lengths, block tables
    and slots differ."""

    def __post_init__(self) -> None:
        assert len(self.query_lens) == len(self.seq_lens) == len(self.block_tables)
        assert 0 <= self.num_prefills <= len(self.query_lens)
        assert self.encoder is None or len(self.encoder.seq_lens) == len(self.seq_lens)

    @property
    def groups(self) -> tuple["AttentionBatch", ...]:
        """Return the step in the blocks of each group of layers."""
        return (self, *self.other_groups)

    def of_group(self, group: int) -> "AttentionBatch":
        """Return the step in the blocks of one group of layers."""
        return self.other_groups[group - 1] if group else self

    @property
    def num_decodes(self) -> int:
        """Return the number of decodes, each of one token."""
        return len(self.query_lens) - self.num_prefills

    @property
    def num_prefill_tokens(self) -> int:
        """Return the number of tokens of all prefills."""
        return int(self.query_lens[: self.num_prefills].sum()) if self.num_prefills else 0

    @property
    def num_padding(self) -> int:
        """Return the number of padding tokens behind the sequences."""
        return len(self.slot_mapping) - self.num_prefill_tokens - self.num_decodes

    def prefills(self) -> "AttentionBatch":
        """Return the part that holds the prefills, without padding."""
        n = self.num_prefills
        return AttentionBatch(
            num_prefills=n,
            query_lens=self.query_lens[:n],
            seq_lens=self.seq_lens[:n],
            block_tables=self.block_tables[:n],
            slot_mapping=self.slot_mapping[: self.num_prefill_tokens],
            encoder=self.encoder and self.encoder.part(0, n),
            other_groups=tuple(group.prefills() for group in self.other_groups),
        )

    def decodes(self) -> "AttentionBatch":
        """Return the part that holds the decodes and the padding."""
        n = self.num_prefills
        return AttentionBatch(
            num_prefills=0,
            query_lens=self.query_lens[n:],
            seq_lens=self.seq_lens[n:],
            block_tables=self.block_tables[n:],
            slot_mapping=self.slot_mapping[self.num_prefill_tokens :],
            encoder=self.encoder and self.encoder.part(n, len(self.seq_lens)),
            other_groups=tuple(group.decodes() for group in self.other_groups),
        )

    def last_tokens(self, is_selected: npt.NDArray[np.bool_]) -> "AttentionBatch":
        """Return the last tokens of some sequences as decodes, which write nothing.

        `is_selected` is `[num_sequences]`. Others write their keys and values.
        """
        seq_lens = self.seq_lens[is_selected]
        return AttentionBatch(
            num_prefills=0,
            query_lens=np.ones(len(seq_lens), dtype=np.int32),
            seq_lens=seq_lens,
            block_tables=self.block_tables[is_selected],
            slot_mapping=np.full(len(seq_lens), -1, dtype=np.int64),
            other_groups=tuple(group.last_tokens(is_selected) for group in self.other_groups),
        )

    def padded(self, num_sequences: int, *widths: int) -> "AttentionBatch":
        """Return a decode-only batch with this number of sequences.

        `widths` are the widths of the block tables of each group, to which tables are truncated.
        Added sequences have no keys and write nothing. Raises ValueError if there are prefills or
        more sequences.
        """
        size, num_blocks = len(self.seq_lens), widths[0]
        shape = num_sequences, num_blocks
        if self.num_prefills or size > num_sequences:
            raise ValueError(
                f"{size} sequences with {self.num_prefills} prefills do not fit a batch of "
                f"{num_sequences} decodes."
            )
        encoder = self.encoder
        return AttentionBatch(
            num_prefills=0,
            query_lens=_fitted(self.query_lens, num_sequences, 1),
            seq_lens=_fitted(self.seq_lens, num_sequences, 0),
            block_tables=_fitted_tables(self.block_tables, shape),
            slot_mapping=_fitted(self.slot_mapping, num_sequences, -1),
            excess=self.excess,
            max_excess=self.max_excess,
            encoder=encoder
            and EncoderBatch(
                query_lens=_fitted(encoder.query_lens, num_sequences, 0),
                seq_lens=_fitted(encoder.seq_lens, num_sequences, 0),
                block_tables=_fitted_tables(encoder.block_tables, shape),
                slot_mapping=encoder.slot_mapping,
            ),
            other_groups=tuple(
                group.padded(num_sequences, width)
                for group, width in zip(self.other_groups, widths[1:], strict=True)
            ),
        )

    def advanced(self, block_size: int) -> "AttentionBatch":
        """Return the batch of the next step, with every decode advanced by one token.

        Raises ValueError if there are prefills, or a token needs a block beyond its table.
        """
        if self.num_prefills:
            raise ValueError(
                f"Only decodes advance, but the batch has {self.num_prefills} prefills."
            )
        index, offset = np.divmod(self.seq_lens, block_size)
        if len(index) and index.max() >= self.block_tables.shape[1]:
            raise ValueError(
                f"Position {int(self.seq_lens.max())} needs block {int(index.max())}, "
                f"but the block table has {self.block_tables.shape[1]}."
            )
        slots = self.slot_mapping.copy()
        blocks = self.block_tables[np.arange(len(index)), index].astype(np.int64)
        slots[: len(index)] = blocks * block_size + offset
        return replace(
            self,
            seq_lens=self.seq_lens + np.int32(1),
            slot_mapping=slots,
            other_groups=tuple(group.advanced(block_size) for group in self.other_groups),
        )


def _fitted(values: npt.NDArray[Any], length: int, fill: int) -> npt.NDArray[Any]:
    """Return the array itself if the length fits, else cut off or padded."""
    if len(values) == length:
        return values
    fitted = np.full(length, fill, dtype=values.dtype)
    fitted[: len(values)] = values[:length]
    return fitted


def _fitted_tables(tables: npt.NDArray[np.int32], shape: tuple[int, int]) -> npt.NDArray[np.int32]:
    fitted = np.zeros(shape, dtype=np.int32)
    common = min(tables.shape[1], shape[1])
    fitted[: len(tables), :common] = tables[:, :common]
    return fitted

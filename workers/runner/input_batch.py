"""The rows of a rank's batch: tokens, block tables and the flat inputs of a step.

Buffers persist, and a plan changes only the rows that it names. Host arrays are NumPy, since a
step touches a few numbers per row. The tokens are in a table on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

from attention.abstract import AttentionBatch
from attention.kernels.arguments import NUM_ITEM_WORDS, Segments
from workers.sampling.edits import Chains
from workers.sampling.logprobs import PromptChunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from pagedray.batch import Decodes, SequenceStart, StepPlan
    from workers.runner.token_table import TokenTable

__all__ = ["InputBatch", "StepInputs", "draft_ids_of"]

_NO_LOGPROBS = -1
_Ints: TypeAlias = "NDArray[np.int64]"
_Flags: TypeAlias = "NDArray[np.bool_]"
_Parts: TypeAlias = "tuple[_Ints, _Ints, _Ints]"
"""For each part: the index of its sequence, its first position and its number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInputs:
    """The inputs of one forward pass."""

    token_ids: torch.Tensor
    """`[num_tokens]` int64, on the device."""
    positions: torch.Tensor
    """`[num_tokens]` int64, on the device."""
    logits_indices: torch.Tensor | None
    """Tokens with logits, int64 on the device: sampled rows first, then `prompt_chunks`. None
    selects every token.
    """
    attention: AttentionBatch
    sampled_rows: _Ints
    """The rows of the batch that sample a token, `[num_sampled]` on the host."""
    sampled_positions: _Ints
    """Positions of the sampled tokens, as `sampled_rows`."""
    sampled_places: tuple[torch.Tensor, torch.Tensor]
    """The same rows and positions on the device, `[num_sampled]` int64 each."""
    draft_ids: _Ints | None = None
    """The token of each sampled row that is a draft, -1 for others, as `sampled_rows`; None without
    drafts."""
    prompt_chunks: tuple[PromptChunk, ...] = ()
    segments: Segments | None = None
    """The tokens of each sequence by row, for models with states; chains keep the states."""
    sampled_sequences: _Flags | None = None
    """Sequences of `attention` that `logits_indices` selects by their last tokens, on the host.
    None unless the selected tokens are exactly the last tokens of some sequences.
    """
    token_rows: torch.Tensor | None = None
    """The row of each token, `[num_tokens]` int64 on the device, if a draft head reads tokens."""
    head_slots: torch.Tensor | None = None
    """The slot of each token in the layer of a draft head, as `token_rows`."""
    sampled_indices: _Ints | None = None
    """The token of the step of each sampled row, on the host; None if all tokens are sampled."""
    chains: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """The row, the first token and the end of the tokens of each sequence, int64 on the device, if
    refused drafts are to be counted."""
    is_overlapped: bool = False
    """Whether positions on the host are too high by the refused drafts of the step before, and
    `draft_ids` say only which rows have drafts."""

    @property
    def has_kept_states(self) -> bool:
        """Whether states advance by the accepted tokens once the step has sampled."""
        return self.segments is not None and self.segments.keeps_states


class InputBatch:
    """The state of every row, updated by plans."""

    def __init__(
        self,
        table: TokenTable,
        *,
        max_num_rows: int,
        max_model_len: int,
        block_size: int,
        replays_decodes: bool,
        windows: tuple[int | None, ...] = (None,),
        has_states: bool = False,
        num_spare_states: int = 0,
        has_head: bool = False,
        head_group: int = 0,
        counts_refused: bool = False,
    ) -> None:
        """`windows` are the windows of the groups of layers, each with a block table for each row.

        `replays_decodes` makes decodes of generated tokens that are computed again.

        Only on a CPU do all other kernels give a token the same numbers in any batch. With
        `has_states`, the parts of a sequence depend on one another, and must be a single segment,
        and each step saves up to `num_spare_states`. `has_head` is whether a draft head reads the
        tokens of steps, and `head_group` the group of its layer. With `counts_refused`, the refused
        drafts of steps are counted on the device, if nothing else counts them.
        """
        assert not (replays_decodes and has_states)
        self._has_head = has_head
        self._head_group = head_group
        self.counts_refused = counts_refused
        self._has_states = has_states
        self._num_spare_states = num_spare_states
        self._table = table
        self._block_size = block_size
        self._replays_decodes = replays_decodes
        self._windows = windows
        self._num_prompt_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self._num_prompt_logprobs = np.full(max_num_rows, _NO_LOGPROBS)
        max_blocks = -(-max_model_len // block_size)
        self._block_tables = np.zeros((len(windows), max_num_rows, max_blocks), dtype=np.int32)
        """Of each group and row. All groups of a row have the same number of entries."""
        self._all_tables = self._block_tables.reshape(len(windows), -1)
        """The same, with the rows of a group behind each other."""
        self._num_entries = np.zeros(max_num_rows, dtype=np.int64)
        self._decode_segments: tuple[bytes, Segments | None] = b"", None
        """The rows of the last step of decodes alone, and their segments."""
        self._most_drafts = 0
        """The most drafts of a row in that step."""

    def warm_up(self) -> None:
        """Compile the kernels of overlapped plans."""
        # Imported here so that this module can be imported without Triton.
        from attention.kernels.triton.advance import shorten, shorten_items

        refused = self._table.num_refused
        words = torch.zeros(1, 2 * NUM_ITEM_WORDS, dtype=torch.int32, device=refused.device)
        shorten(words[0, 4:5], refused[:1].clone(), words, refused[:1], block_size=self._block_size)
        shorten_items(words, refused[:1])
        if self.counts_refused:
            numbers = torch.zeros_like(refused[:1])
            self._table.count_refused((numbers,) * 3, (numbers,) * 2)

    def apply_plan(self, plan: StepPlan) -> None:
        """Start the rows of new sequences and append new blocks to block tables."""
        if plan.starts:
            self._table.start_rows(
                [start.row for start in plan.starts],
                [start.token_ids for start in plan.starts],
                [start.donor_row for start in plan.starts],
            )
        for start in plan.starts:
            self._start(start)
        for chunk in plan.chunks:
            if chunk.new_block_ids:
                self._append_blocks(chunk.row, chunk.new_block_ids)
        if plan.decodes.draft_ids or plan.num_drafts or plan.is_overlapped:
            self._append_chain_blocks(plan.decodes)
        elif plan.decodes.growing_rows:
            rows = np.frombuffer(plan.decodes.growing_rows, np.int32)
            ends = self._num_entries[rows]
            blocks = np.frombuffer(plan.decodes.new_block_ids, np.int32)
            self._block_tables[:, rows, ends] = blocks.reshape(len(rows), -1).T
            self._num_entries[rows] = ends + 1

    def _append_chain_blocks(self, decodes: Decodes) -> None:
        """Append the blocks of rows, of which a row may have several."""
        growing_rows = np.frombuffer(decodes.growing_rows, np.int32).tolist()
        blocks = np.frombuffer(decodes.new_block_ids, np.int32)
        entries = blocks.reshape(-1, len(self._windows)).tolist()
        for row, entry in zip(growing_rows, entries, strict=True):
            self._append_blocks(row, entry)

    def first_rows(self, plan: StepPlan) -> list[int]:
        """Return the rows of which a step computes the first token of their sequences."""
        rows = [chunk.row for chunk in plan.chunks if chunk.first_position == 0]
        if plan.decodes.rows:
            is_first = np.frombuffer(plan.decodes.positions, np.int32) == 0
            rows += np.frombuffer(plan.decodes.rows, np.int32)[is_first].tolist()
        return rows

    def prepare_inputs(self, plan: StepPlan) -> StepInputs:
        """Return the flat inputs of a step, tokens in the plan's order.

        On a CPU, generated tokens that are computed again are decodes, after all prefills.
        """
        self._table.has_refused = False
        if not plan.chunks:
            return self._decode_inputs(plan.decodes, is_overlapped=plan.is_overlapped)
        has_drafts = len(plan.decodes.draft_ids) > 0
        assert not (self._has_states and has_drafts)
        rows, first_positions, num_tokens, is_sampled = _columns(plan)
        size = len(rows)
        described = np.flatnonzero(self._num_prompt_logprobs[rows] != _NO_LOGPROBS)

        sampled_rows = rows[is_sampled]
        sampled_positions = (first_positions + num_tokens)[is_sampled]
        # The prompt is in the first part of a sequence, and the sampling token in the last part.
        first_parts = last_parts = np.arange(size)
        if self._replays_decodes and num_tokens[0] > 1:
            owners, first_positions, num_tokens = self._parts(rows, first_positions, num_tokens)
            rows = rows[owners]
            first_parts, last_parts = _outer_parts(owners, size)

        ends = np.cumsum(num_tokens)
        token_rows = np.repeat(rows, num_tokens)
        offsets = np.arange(ends[-1]) - np.repeat(ends - num_tokens, num_tokens)
        positions = np.repeat(first_positions, num_tokens) + offsets
        seq_lens = first_positions + num_tokens
        sampled_indices = logits_indices = ends[last_parts[is_sampled]] - 1
        chunks: list[PromptChunk] = []
        for part in first_parts[described].tolist():
            first = int(first_positions[part])
            chunk = self._prompt_chunk(int(rows[part]), first, int(num_tokens[part]))
            if chunk is not None:
                chunks.append(chunk)
                begin = ends[part] - num_tokens[part]
                more = np.arange(begin, begin + len(chunk.token_ids))
                logits_indices = np.concatenate((logits_indices, more))
        attention = self._attention_batch(
            rows,
            int((num_tokens > 1).sum()),
            num_tokens.astype(np.int32),
            seq_lens,
            token_rows,
            positions,
        )
        arrays = {"logits": logits_indices, "rows": sampled_rows, "positions": sampled_positions}
        if self._has_head:
            arrays |= {"token_rows": token_rows, "head_slots": self._head_slots(attention)}
        if self._has_states:
            arrays |= {"segment_rows": rows, "starts": np.concatenate(([0], ends))}
            # On a GPU, kernels are compiled for saves at the start.
            if plan.saves or self._table.token_ids.is_cuda:
                arrays["save_ends"] = self._save_ends(plan, rows, ends - seq_lens)
        token_ids, device_positions, others = self._table.begin_step(
            token_rows,
            positions,
            *arrays.values(),
            draft_ids=draft_ids_of(plan.decodes, len(positions)) if has_drafts else None,
        )
        uploaded = dict(zip(arrays, others, strict=True))
        selects_all = is_sampled.all() and ends[-1] == size and not chunks
        has_others = selects_all or bool(chunks) or len(rows) > size
        return StepInputs(
            token_ids=token_ids,
            positions=device_positions,
            logits_indices=None if selects_all else uploaded["logits"],
            sampled_sequences=None if has_others else is_sampled,
            attention=attention,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
            sampled_places=(uploaded["rows"], uploaded["positions"]),
            draft_ids=draft_ids_of(plan.decodes, len(sampled_rows)) if has_drafts else None,
            prompt_chunks=tuple(chunks),
            segments=_segments(uploaded, num_tokens),
            token_rows=uploaded.get("token_rows"),
            head_slots=uploaded.get("head_slots"),
            sampled_indices=None if selects_all else sampled_indices,
        )

    def _decode_inputs(self, decodes: Decodes, *, is_overlapped: bool) -> StepInputs:
        """Compute `prepare_inputs` faster, for a step of decodes alone."""
        rows = np.frombuffer(decodes.rows, np.int32).astype(np.int64)
        positions = np.frombuffer(decodes.positions, np.int32).astype(np.int64)
        ends = positions + 1
        draft_ids, written = None, None
        if decodes.draft_ids:
            draft_ids = written = draft_ids_of(decodes, len(rows))
        elif is_overlapped and (rows[1:] == rows[:-1]).any():
            draft_ids = draft_ids_of(decodes, len(rows))
        # Most steps have the rows of the step before; these also say which decodes are chains.
        kept_rows, kept = self._decode_segments
        is_new = self._has_states and kept_rows != decodes.rows
        starts = np.arange(len(rows) + 1)
        if is_new and draft_ids is not None:
            # A chain is several decodes, but a single segment.
            starts = np.flatnonzero(np.append(draft_ids, -1) < 0)
        attention = self._attention_batch(
            rows,
            0,
            np.ones(len(rows), dtype=np.int32),
            ends,
            rows,
            positions,
            has_chains=draft_ids is not None,
        )
        arrays = {"rows": rows, "ends": ends}
        most_before, self._most_drafts = self._most_drafts, 0
        if draft_ids is not None:
            chains = Chains(draft_ids)
            self._most_drafts = int(chains.lengths.max()) - 1
            if self.counts_refused:
                arrays |= {"chain_rows": rows[chains.firsts], "firsts": chains.firsts}
                arrays["chain_ends"] = chains.firsts + chains.lengths
        if self._has_head:
            arrays["head_slots"] = self._head_slots(attention)
        if is_new:
            arrays |= {"segment_rows": rows[starts[:-1]], "starts": starts}
        token_ids, device_positions, others = self._table.begin_step(
            rows, positions, *arrays.values(), draft_ids=written, is_overlapped=is_overlapped
        )
        uploaded = dict(zip(arrays, others, strict=True))
        device_rows, device_ends = uploaded["rows"], uploaded["ends"]
        if is_overlapped:
            device_ends = device_positions + 1
            excess = self._table.num_refused.index_select(0, device_rows)
            attention = replace(attention, excess=excess, max_excess=most_before)
        device_chains = None
        if "firsts" in uploaded:
            device_chains = uploaded["chain_rows"], uploaded["firsts"], uploaded["chain_ends"]
        if is_new:
            kept = _segments(uploaded, np.diff(starts), is_chained=draft_ids is not None)
            self._decode_segments = decodes.rows, kept
        return StepInputs(
            token_ids=token_ids,
            positions=device_positions,
            logits_indices=None,
            attention=attention,
            sampled_rows=rows,
            sampled_positions=ends,
            sampled_places=(device_rows, device_ends),
            draft_ids=draft_ids,
            segments=kept,
            token_rows=device_rows if self._has_head else None,
            head_slots=uploaded.get("head_slots"),
            chains=device_chains,
            is_overlapped=is_overlapped,
        )

    def next_tokens(self, inputs: StepInputs) -> torch.Tensor:
        """Return the token that follows each token of a step, `[num_tokens]` int64.

        Tokens behind the last sampled token of a row may be any tokens.
        """
        assert inputs.token_rows is not None
        return self._table.all_tokens[inputs.token_rows, inputs.positions + 1]

    def draft_batch(self, rows: _Ints, positions: _Ints) -> AttentionBatch:
        """Return the decodes of drafts at these positions of rows, for a draft head.

        A draft without a block is not written, and sees the tokens that have blocks.
        """
        num_slots = self._num_entries[rows] * self._block_size
        seen = np.minimum(positions, num_slots - 1)
        ones = np.ones(len(rows), dtype=np.int32)
        batch = self._attention_batch(rows, 0, ones, seen + 1, rows, seen)
        if (seen == positions).all():
            return batch
        groups = [
            replace(group, slot_mapping=np.where(seen < positions, -1, group.slot_mapping))
            for group in batch.groups
        ]
        return replace(groups[0], other_groups=tuple(groups[1:]))

    @property
    def table(self) -> TokenTable:
        """The tokens of all rows."""
        return self._table

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._block_size

    @property
    def max_num_blocks(self) -> int:
        """The most entries of a block table, rounded up to an even number."""
        return -(-self._block_tables.shape[2] // 2) * 2

    def draft_tables(self, rows: _Ints) -> tuple[_Ints, NDArray[np.int32]]:
        """Return the slots of rows, and their block tables for a draft head, contiguous.

        The width of the tables is even.
        """
        entries = self._num_entries[rows]
        width = -(-int(entries.max()) // 2) * 2
        tables = np.zeros((len(rows), width), dtype=np.int32)
        found = self._block_tables[self._head_group, rows, :width]
        tables[:, : found.shape[1]] = found
        return entries * self._block_size, tables

    def append_sampled(self, inputs: StepInputs, token_ids: torch.Tensor) -> torch.Tensor:
        """Append the sampled tokens, `[num_sampled]` int64, to their rows; return them on the host.

        The device may still write the result, which is that of `TokenTable.append`.
        """
        appended = self._table.append(*inputs.sampled_places, token_ids)
        if inputs.chains is not None:
            self._table.count_refused(inputs.chains, (inputs.token_ids, inputs.positions))
        return appended

    def _start(self, start: SequenceStart) -> None:
        self._num_prompt_tokens[start.row] = start.num_prompt_tokens
        # Other sequences of a request have the same prompt.
        number = start.sampling.prompt_logprobs if start.index == 0 else None
        self._num_prompt_logprobs[start.row] = _NO_LOGPROBS if number is None else number
        num_shared = 0
        if start.donor_row >= 0:
            num_shared = (start.num_prompt_tokens - 1) // self._block_size
            donor = self._block_tables[:, start.donor_row, :num_shared]
            self._block_tables[:, start.row, :num_shared] = donor
        self._num_entries[start.row] = num_shared
        self._append_blocks(start.row, start.block_ids)

    def _save_ends(self, plan: StepPlan, rows: _Ints, offsets: _Ints) -> _Ints:
        """Return `Segments.save_ends`; offsets of rows are from positions to tokens of the step."""
        save_ends = np.full(self._num_spare_states, -1)
        for spare, save in enumerate(plan.saves):
            save_ends[spare] = save.position + int(offsets[rows == save.row][0])
        return save_ends

    def _prompt_chunk(self, row: int, position: int, num_tokens: int) -> PromptChunk | None:
        """Return the prompt tokens that get log-probabilities from the tokens at `position` on.

        None behind the prompt.
        """
        end = min(position + 1 + num_tokens, int(self._num_prompt_tokens[row]))
        if end <= position + 1:
            return None
        return PromptChunk(
            row=row,
            first_position=position + 1,
            token_ids=self._table.tokens(row, position + 1, end),
            num_likeliest=int(self._num_prompt_logprobs[row]),
        )

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        first = self._num_entries[row]
        entries = np.array(block_ids, dtype=np.int32).reshape(-1, len(self._windows))
        end = first + len(entries)
        # No step reads an entry without a block.
        self._block_tables[:, row, first:end] = np.maximum(entries, 0).T
        self._num_entries[row] = end

    def _parts(self, rows: _Ints, first_positions: _Ints, num_tokens: _Ints) -> _Parts:
        """Split chunks so that each generated token in them is a decode, as it was at first.

        Attention adds up a chunk in another order than a decode, so the keys and values of the
        layers above would be rounded differently, and sampling might choose another token.
        """
        firsts, counts = first_positions.tolist(), num_tokens.tolist()
        parts: list[tuple[int, int, int]] = []
        for i, num_prompt_tokens in enumerate(self._num_prompt_tokens[rows].tolist()):
            first, end = firsts[i], firsts[i] + counts[i]
            if first < num_prompt_tokens:
                parts.append((i, first, min(end, num_prompt_tokens) - first))
                first = parts[-1][1] + parts[-1][2]
            parts += [(i, position, 1) for position in range(first, end)]
        # Prefills come first, and otherwise the order remains.
        parts.sort(key=lambda part: part[2] == 1)
        owners, starts, lengths = np.array(parts, dtype=np.int64).T
        return owners, starts, lengths

    def _attention_batch(
        self,
        rows: _Ints,
        num_prefills: int,
        query_lens: NDArray[np.int32],
        seq_lens: _Ints,
        token_rows: _Ints,
        positions: _Ints,
        *,
        has_chains: bool = False,
    ) -> AttentionBatch:
        """Return the batch of sequences in these rows, prefills first.

        `token_rows` and `positions` are by token.
        """
        places = self._places(token_rows, positions // self._block_size)
        slots = self._all_tables.take(places, axis=1).astype(np.int64)
        slots *= self._block_size
        slots += positions % self._block_size
        groups = [
            AttentionBatch(
                num_prefills=num_prefills,
                query_lens=query_lens,
                seq_lens=lengths,
                block_tables=block_tables,
                slot_mapping=group_slots,
                has_chains=has_chains,
            )
            for group_slots, (block_tables, lengths) in zip(
                slots, self._seen_tables(rows, query_lens, seq_lens), strict=True
            )
        ]
        return groups[0] if len(groups) == 1 else replace(groups[0], other_groups=tuple(groups[1:]))

    def _head_slots(self, attention: AttentionBatch) -> _Ints:
        return attention.of_group(self._head_group).slot_mapping

    def _seen_tables(
        self, rows: _Ints, query_lens: NDArray[np.int32], seq_lens: _Ints
    ) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yield the block tables of rows in each group, and the tokens that they hold.

        Tables are as wide as necessary, and omit all blocks behind the window of the first query.
        """
        first = 0
        for window, groups in groupby(self._windows):
            end = first + len(list(groups))
            if window is None:
                num_entries = -(-int(seq_lens.max()) // self._block_size)
                tables = self._block_tables[first:end, rows, :num_entries]
                lengths = seq_lens.astype(np.int32)
            else:
                places, lengths = self._shift(rows, query_lens, seq_lens, window)
                tables = self._all_tables[first:end].take(places, axis=1)
            yield from ((of_group, lengths) for of_group in tables)
            first = end

    def _shift(
        self, rows: _Ints, query_lens: NDArray[np.int32], seq_lens: _Ints, window: int
    ) -> tuple[_Ints, NDArray[np.int32]]:
        """Return the entries of rows that a window covers, and the tokens in them."""
        firsts = np.maximum(seq_lens - query_lens - window + 1, 0) // self._block_size
        lengths = seq_lens - firsts * self._block_size
        entries = firsts[:, None] + np.arange(-(-int(lengths.max()) // self._block_size))
        # Tables of shorter sequences are padded with any blocks.
        entries = np.minimum(entries, self._block_tables.shape[2] - 1)
        return self._places(rows[:, None], entries), lengths.astype(np.int32)

    def _places(self, rows: _Ints, entries: _Ints) -> _Ints:
        """Return where entries of rows are in the table of each group."""
        places: _Ints = rows * self._block_tables.shape[2] + entries
        return places


def _outer_parts(owners: _Ints, size: int) -> tuple[_Ints, _Ints]:
    """Return the first and the last part of each of `size` sequences, given the owners of parts."""
    parts = np.arange(len(owners))
    first, last = np.zeros((2, size), dtype=np.int64)
    # Of several values for a sequence, the last one remains.
    first[owners[::-1]] = parts[::-1]
    last[owners] = parts
    return first, last


def _segments(
    uploaded: dict[str, torch.Tensor], num_tokens: _Ints, *, is_chained: bool = False
) -> Segments | None:
    """Return the segments of a step, if it has any. Segments of chains keep the states."""
    if "segment_rows" not in uploaded:
        return None
    save_ends = uploaded.get("save_ends")
    return Segments(
        query_starts=uploaded["starts"].int(),
        rows=uploaded["segment_rows"].int(),
        max_query_len=int(num_tokens.max()),
        num_prompts=0 if is_chained else int((num_tokens > 1).sum()),
        save_ends=None if save_ends is None else save_ends.int(),
        is_chained=is_chained,
        keeps_states=is_chained,
    )


def draft_ids_of(decodes: Decodes, size: int) -> _Ints:
    """Return the token of each of `size` places that is a draft, and -1 for others.

    The decodes have the last places. Drafts that are not known to the host are 0.
    """
    rows, known = (np.frombuffer(part, np.int32) for part in (decodes.rows, decodes.draft_ids))
    draft_ids = np.full(size, -1)
    of_decodes = draft_ids[size - len(rows) :]
    of_decodes[1:][rows[1:] == rows[:-1]] = known if len(known) else 0
    return draft_ids


def _columns(plan: StepPlan) -> tuple[_Ints, _Ints, _Ints, _Flags]:
    """Return row, first position, number of tokens and whether it samples, of each sequence.

    The plan has chunks.
    """
    rows = np.frombuffer(plan.decodes.rows, np.int32)
    positions = np.frombuffer(plan.decodes.positions, np.int32)
    ones = np.ones(len(rows), dtype=np.int64)
    last = (rows.astype(np.int64), positions.astype(np.int64), ones, ones.astype(np.bool_))
    chunks = np.array(
        [(one.row, one.first_position, one.num_tokens, one.is_sampled) for one in plan.chunks],
        dtype=np.int64,
    )
    first = chunks.T
    return (
        np.concatenate((first[0], last[0])),
        np.concatenate((first[1], last[1])),
        np.concatenate((first[2], last[2])),
        np.concatenate((first[3].astype(np.bool_), last[3])),
    )

"""The sampler of a rank: from logits to the next token of every sampled row.

The order is: bias and min_tokens, penalties, bad words, masks, choice (`workers.sampling.choice`
defines it). Log-probabilities are of the logits before all of these. The sampled token depends only
on the logits, the request and the position: not on the batch, the row or an earlier preemption. The
sampler does not know blocks, plans, or when a sequence ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntFlag
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from workers.sampling.choice import Choice, Draws, IntArray
from workers.sampling.device_choice import Uploader
from workers.sampling.edits import (
    BadWords,
    Chains,
    LogitEdits,
    Penalties,
    apply_masks,
    num_mask_bytes,
)
from workers.sampling.logprobs import (
    LogprobReports,
    PromptChunk,
    PromptReport,
    RawLogprobs,
    describe_prompts,
)
from workers.sampling.noise import generator_start, noise_keys
from workers.sampling.numpy_choice import NumpyChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagedray.batch import SequenceStart, TokenLogprobs
    from workers.layers.sharded_logits import ShardedLogits

__all__ = ["Sampled", "Sampler"]

_MAX_SCORE_BYTES = 2**26
_Ints: TypeAlias = "Sequence[int] | IntArray"

# At a lower temperature, rows are greedy: float32 could not hold a score over it with its noise.
LOWEST_TEMPERATURE = 1e-5
_NO_POSITION = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The tokens of one step, in the order of the rows."""

    token_ids: Tensor
    """int64 `[num_rows]`; -1 where the logits hold NaN or +inf, or nothing but -inf."""
    reports: tuple[tuple[IntArray, LogprobReports], ...] = ()
    """Log-probabilities, with the indices of their rows."""
    draft_ids: Tensor | None = None
    """Drafts behind the last token of each sequence, int64 `[num_sequences, num_drafts]` on the
    host, or None."""

    @property
    def logprobs(self) -> list[TokenLogprobs | None]:
        """Reports by row; empty if no row requested them. Waits for their copies to the host."""
        if not self.reports:
            return []
        logprobs: list[TokenLogprobs | None] = [None] * len(self.token_ids)
        for indices, reports in self.reports:
            for index, report in zip(indices.tolist(), reports.as_list(), strict=True):
                logprobs[index] = report
        return logprobs


class Sampler:
    """Samples the next tokens, and keeps the state that this needs for each row.

    Does not wait for the device.
    """

    def __init__(
        self,
        *,
        max_num_rows: int,
        vocab_size: int,
        device: torch.device,
        choice: Choice | None = None,
        max_score_bytes: int = _MAX_SCORE_BYTES,
    ) -> None:
        """Choose by `choice`, or by the fastest way on the device.

        Rows with edits, filters or reports are sampled in parts of `max_score_bytes` of float32
        scores, since each kind allocates as much again.
        """
        self._vocab_size = vocab_size
        self._max_part = max(1, max_score_bytes // (4 * vocab_size))
        self._device = device
        self._uploader = Uploader(device)
        self._choice = choice or _fastest_choice(self._uploader)
        self._rows = SamplingRows(max_num_rows, vocab_size)
        self._edits = LogitEdits(vocab_size, device)
        self._penalties = Penalties(max_num_rows, vocab_size, device)
        self._bad_words = BadWords(max_num_rows, vocab_size, device)

    @property
    def choice(self) -> Choice:
        """How tokens are chosen."""
        return self._choice

    def random_rows(self, rows: IntArray) -> IntArray:
        """Return the indices of rows that draw their tokens."""
        return np.flatnonzero(self._rows.needs(rows) & Need.RANDOM)

    def draws(self, rows: IntArray, positions: IntArray) -> Draws:
        """Return how the tokens at these positions of these rows are drawn."""
        return self._rows.draws(rows, positions)

    def generator_starts(self, rows: IntArray) -> IntArray:
        """Return where the generators of rows start, 64 bits each."""
        return self._rows.generator_starts(rows)

    def start(self, start: SequenceStart) -> None:
        """Start a sequence in its row, and drop all state of the former sequence of the row."""
        self._rows.start(start)
        self._edits.end(start.row)
        self._bad_words.end(start.row)
        needs = self._rows.needs(np.array([start.row]))[0]
        if needs & Need.EDIT:
            self._edits.start(start)
        if needs & Need.PENALTY:
            self._penalties.start(start)
        if needs & Need.BAD_WORDS:
            self._bad_words.start(start)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Sample once with each kernel, so that no step waits for compilation.

        `dtype` is that of the logits; where they are edited, scores are float32.
        """
        indices = np.zeros(1, dtype=np.int64)
        draws = Draws(
            temperature=np.ones(1),
            top_k=np.array([self._vocab_size]),
            top_p=np.array([0.5]),
            min_p=np.zeros(1),
            key=np.zeros(1, dtype=np.int64),
        )
        for scores_dtype in dict.fromkeys((dtype, torch.float32)):
            scores = torch.zeros((1, self._vocab_size), dtype=scores_dtype, device=self._device)
            self._choice.greedy(scores, indices)
            self._choice.tokens_of(self._choice.local_maxima(scores, 0).unsqueeze(1))
            self._choice.unfiltered(scores, indices, draws)
            self._choice.filtered(scores, indices, draws)

    def has_masked(self, rows: _Ints, positions: _Ints) -> bool:
        """Return whether the token at any of these positions of these rows is masked."""
        return bool((self._needs_at(rows, positions) & Need.MASK).any())

    def needs_whole(self, rows: _Ints, positions: _Ints) -> bool:
        """Return whether any of these tokens needs logits that other ranks hold."""
        return bool((self._needs_at(rows, positions) & ~Need.RANDOM).any())

    def only_draws(self, rows: IntArray) -> bool:
        """Return whether these rows need no more than noise and filters."""
        return not (self._rows.needs(rows) & ~(Need.RANDOM | Need.FILTER)).any()

    def _needs_at(self, rows: _Ints, positions: _Ints) -> IntArray:
        row_ids = np.array(rows, dtype=np.int64)
        return self._rows.needs_at(row_ids, np.array(positions, dtype=np.int64))

    @torch.no_grad()
    def sample_sharded(
        self,
        logits: ShardedLogits,
        rows: _Ints,
        positions: _Ints,
        exact_positions: Tensor | None = None,
    ) -> Sampled:
        """Return the tokens of rows that need no whole logits.

        Each rank finds the maxima of its part, with noise for random rows; ranks gather these.
        `exact_positions` as in `sample`.
        """
        part, first_id = logits.part, logits.first_id
        row_ids, row_positions = np.array(rows, dtype=np.int64), np.array(positions, dtype=np.int64)
        needs = self._rows.needs_at(row_ids, row_positions)
        local_maxima = None if needs.all() else self._choice.local_maxima(part, first_id)
        if len(drawn := np.flatnonzero(needs)):
            draws = self._draws(row_ids, row_positions, drawn, exact_positions)
            drawn_maxima = self._choice.drawn_maxima(part, drawn, draws, first_id)
            if local_maxima is None:
                local_maxima = drawn_maxima
            else:
                local_maxima[self._uploader.upload(drawn)] = drawn_maxima
        assert local_maxima is not None
        return Sampled(self._choice.tokens_of(logits.gather(local_maxima)))

    @torch.no_grad()
    def describe_prompts(
        self, chunks: Sequence[PromptChunk], hidden: Tensor, logits_of: Callable[[Tensor], Tensor]
    ) -> list[PromptReport]:
        """Return reports on tokens of prompts, as `prompt_logprobs.describe_prompts` does."""
        return describe_prompts(chunks, hidden, logits_of, self._choice)

    @torch.no_grad()
    def sample(
        self,
        logits: Tensor,
        rows: _Ints,
        positions: _Ints,
        masks: bytes = b"",
        released: Sequence[int] = (),
        *,
        draft_ids: IntArray | None = None,
        exact_positions: Tensor | None = None,
    ) -> Sampled:
        """Return the tokens at these positions of these rows; may overwrite the logits.

        `logits` is `[num_rows, vocab_size or more]`; columns beyond the vocabulary are ignored.
        `masks` belong to the masked rows among them, in order; masks at the indices `released` are
        the last masks of their rows. `draft_ids` has the token of each row that is a draft, -1 for
        others: a row with a draft follows the same row one position before. `exact_positions`,
        int64 `[num_rows]` on the device, replace the positions of rows with `only_draws`.
        """
        logits = logits[:, : self._vocab_size]
        row_ids = np.array(rows, dtype=np.int64)
        row_positions = np.array(positions, dtype=np.int64)
        needs = self._rows.needs_at(row_ids, row_positions)
        if not needs.any():
            return Sampled(self._choice.greedy(logits, np.arange(len(row_ids))))
        if exact_positions is not None:
            token_ids = self._chosen(logits, row_ids, row_positions, needs, exact_positions)
            return Sampled(token_ids)
        masked = np.flatnonzero(needs & Need.MASK)
        mask_bytes = num_mask_bytes(self._vocab_size)
        chains = None if draft_ids is None else Chains(draft_ids)
        contexts = None if chains is None else chains.contexts()
        parts, reports = [], []
        allocates = (needs & ~Need.RANDOM).any()
        num_parts = -(-len(row_ids) // self._max_part) if allocates else 1
        for indices in np.array_split(np.arange(len(row_ids)), num_parts):
            part = slice(indices[0], indices[-1] + 1)
            first, end = np.searchsorted(masked, (part.start, part.stop)) * mask_bytes
            sampled = self._sample_part(
                logits[part],
                row_ids[part],
                row_positions[part],
                needs[part],
                masks[first:end],
                None if contexts is None else contexts[part],
            )
            parts.append(sampled.token_ids)
            reports += [(part.start + reported, report) for reported, report in sampled.reports]
        if released:
            self._rows.release(row_ids[masked[list(released)]])
        chosen = parts[0] if num_parts == 1 else torch.cat(parts)
        self._count(chosen, row_ids, needs, chains)
        return Sampled(chosen, tuple(reports))

    def _sample_part(
        self,
        logits: Tensor,
        rows: IntArray,
        positions: IntArray,
        needs: IntArray,
        masks: bytes,
        contexts: IntArray | None,
    ) -> Sampled:
        reported = np.flatnonzero(needs & Need.LOGPROBS)
        # Their log-probabilities are taken from the logits while these are whole.
        raw_logprobs = self._raw_logprobs(logits, rows, reported)
        scores = self._edited(logits, rows, positions, needs, masks, contexts)
        token_ids = self._chosen(scores, rows, positions, needs)
        if raw_logprobs is None:
            return Sampled(token_ids)
        chosen = token_ids[self._uploader.upload(reported)]
        return Sampled(token_ids, ((reported, raw_logprobs.report(chosen)),))

    def _raw_logprobs(
        self, logits: Tensor, rows: IntArray, indices: IntArray
    ) -> RawLogprobs | None:
        if not len(indices):
            return None
        reported = rows[indices]
        return RawLogprobs(
            logits,
            indices,
            self._rows.num_logprobs(reported),
            self._rows.reported_ids(reported),
            self._choice,
        )

    def _edited(
        self,
        logits: Tensor,
        rows: IntArray,
        positions: IntArray,
        needs: IntArray,
        masks: bytes,
        contexts: IntArray | None,
    ) -> Tensor:
        edited = np.flatnonzero(needs & Need.EDIT)
        penalized = np.flatnonzero(needs & Need.PENALTY)
        worded = np.flatnonzero(needs & Need.BAD_WORDS)
        masked = np.flatnonzero(needs & Need.MASK)
        if not any(map(len, (edited, penalized, worded, masked))):
            return logits
        scores = logits.float()
        if len(edited):
            self._edits.apply(scores, edited, rows[edited], positions[edited])
        if len(penalized):
            before = None if contexts is None else contexts[penalized]
            self._penalties.apply(scores, penalized, rows[penalized], before)
        if len(worded):
            before = None if contexts is None else contexts[worded]
            self._bad_words.apply(scores, worded, rows[worded], before)
        if len(masked):
            apply_masks(scores, masked, masks)
        return scores

    def _chosen(
        self,
        scores: Tensor,
        rows: IntArray,
        positions: IntArray,
        needs: IntArray,
        exact_positions: Tensor | None = None,
    ) -> Tensor:
        way = needs & (Need.RANDOM | Need.FILTER)
        parts = []
        if len(greedy := np.flatnonzero(way == 0)):
            parts.append((greedy, self._choice.greedy(scores, greedy)))
        if len(whole := np.flatnonzero(way == Need.RANDOM)):
            draws = self._draws(rows, positions, whole, exact_positions)
            parts.append((whole, self._choice.unfiltered(scores, whole, draws)))
        if len(cut := np.flatnonzero(way == Need.RANDOM | Need.FILTER)):
            draws = self._draws(rows, positions, cut, exact_positions)
            parts.append((cut, self._choice.filtered(scores, cut, draws)))
        if len(parts) == 1:
            return parts[0][1]
        token_ids = torch.empty(len(rows), dtype=torch.int64, device=self._device)
        for indices, part in parts:
            token_ids[self._uploader.upload(indices)] = part
        return token_ids

    def _draws(
        self, rows: IntArray, positions: IntArray, indices: IntArray, exact: Tensor | None
    ) -> Draws:
        """Return how the tokens at some indices are drawn, by the exact positions if given."""
        chosen = rows[indices]
        draws = self._rows.draws(chosen, positions[indices])
        if exact is None:
            return draws
        if len(indices) < len(rows):
            exact = exact.index_select(0, self._uploader.upload(indices))
        return replace(draws, key=self._rows.generator_starts(chosen), positions=exact)

    def _count(
        self, token_ids: Tensor, rows: IntArray, needs: IntArray, chains: Chains | None
    ) -> None:
        """Record the tokens that follow the drafts that were right."""
        penalized = np.flatnonzero(needs & Need.PENALTY)
        worded = np.flatnonzero(needs & Need.BAD_WORDS)
        if not (len(penalized) or len(worded)):
            return
        chains = chains or Chains(np.full(len(rows), -1))
        accepted = chains.accepted(token_ids)
        if len(penalized):
            chosen = accepted[self._uploader.upload(penalized)]
            self._penalties.count(rows[penalized], chosen)
        if len(worded):
            chosen = accepted[self._uploader.upload(worded)]
            self._bad_words.append(rows[worded], chosen, chains.of(worded))


def _fastest_choice(uploader: Uploader) -> Choice:
    if uploader.device.type != "cuda":
        return NumpyChoice()
    # Triton is imported where there is a GPU to compile for.
    from workers.sampling.device_choice import TritonChoice

    return TritonChoice(uploader)


class Need(IntFlag):
    """Needs of a row beyond its most likely token."""

    RANDOM = 1
    FILTER = 2
    EDIT = 4
    PENALTY = 8
    LOGPROBS = 16
    MASK = 32
    BAD_WORDS = 64


class SamplingRows:
    """The sampling parameters of every row.

    `rows` and `positions` are int64 `[num_rows]` on the host, and so are results.
    """

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._needs = np.zeros(max_num_rows, dtype=np.int64)
        self._generator_starts = np.zeros(max_num_rows, dtype=np.uint64)
        self._temperature = np.ones(max_num_rows)
        self._top_k = np.zeros(max_num_rows, dtype=np.int64)
        self._top_p = np.ones(max_num_rows)
        self._min_p = np.zeros(max_num_rows)
        self._mask_positions = np.full(max_num_rows, _NO_POSITION)
        """The position from which each row samples under masks."""
        self._num_logprobs = np.zeros(max_num_rows, dtype=np.int64)
        self._reported_ids: dict[int, IntArray] = {}
        """The tokens that rows report in place of the most likely tokens."""

    def start(self, start: SequenceStart) -> None:
        """Replace all that is known of the row."""
        row, sampling = start.row, start.sampling
        self._needs[row] = self._needs_of(start)
        self._generator_starts[row] = generator_start(start.seed, start.index)
        self._temperature[row] = sampling.temperature
        top_k = sampling.top_k if sampling.top_k > 0 else self._vocab_size
        self._top_k[row] = min(top_k, self._vocab_size)
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._mask_positions[row] = (
            _NO_POSITION if start.mask_start is None else start.num_prompt_tokens + start.mask_start
        )
        self._num_logprobs[row] = sampling.logprobs or 0
        self._reported_ids.pop(row, None)
        if sampling.logprob_token_ids:
            distinct = dict.fromkeys(sampling.logprob_token_ids)
            self._reported_ids[row] = np.array(list(distinct), dtype=np.int64)
            self._num_logprobs[row] = len(distinct)

    def release(self, rows: IntArray) -> None:
        """Let these rows sample without masks."""
        self._mask_positions[rows] = _NO_POSITION

    def needs(self, rows: IntArray) -> IntArray:
        """Return the `Need` flags of these rows, without that of masks."""
        return self._needs[rows]

    def needs_at(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Return the `Need` flags of these rows at these positions."""
        needs = self._needs[rows]
        is_masked = positions >= self._mask_positions[rows]
        if is_masked.any():
            needs[is_masked] |= Need.MASK
        return needs

    def num_logprobs(self, rows: IntArray) -> IntArray:
        """Return how many tokens these rows report, in addition to the sampled tokens."""
        return np.minimum(self._num_logprobs[rows], self._vocab_size)

    def reported_ids(self, rows: IntArray) -> IntArray:
        """Return the tokens that these rows report in place of the most likely tokens.

        `[num_rows, most tokens of a row]`; -1 where a row reports its most likely tokens, or less.
        """
        if not self._reported_ids:
            return np.empty((len(rows), 0), dtype=np.int64)
        given = [self._reported_ids.get(row) for row in rows.tolist()]
        width = max((len(ids) for ids in given if ids is not None), default=0)
        found = np.full((len(rows), width), -1)
        for ids, one in zip(given, found, strict=True):
            if ids is not None:
                one[: len(ids)] = ids
        return found

    def generator_starts(self, rows: IntArray) -> IntArray:
        """Return where the generators of these rows start."""
        return self._generator_starts[rows].view(np.int64)

    def draws(self, rows: IntArray, positions: IntArray) -> Draws:
        """Return how the tokens at these positions of these rows are drawn."""
        return Draws(
            temperature=self._temperature[rows],
            top_k=self._top_k[rows],
            top_p=self._top_p[rows],
            min_p=self._min_p[rows],
            key=noise_keys(self._generator_starts[rows], positions),
        )

    def _needs_of(self, start: SequenceStart) -> Need:
        sampling, need = start.sampling, Need(0)
        if not sampling.is_greedy and sampling.temperature >= LOWEST_TEMPERATURE:
            need |= Need.RANDOM
            is_cut_off = 0 < sampling.top_k < self._vocab_size
            if is_cut_off or sampling.top_p < 1.0 or sampling.min_p > 0.0:
                need |= Need.FILTER
        if sampling.logit_bias or sampling.allowed_token_ids or sampling.min_tokens > 0:
            need |= Need.EDIT
        if sampling.has_penalty:
            need |= Need.PENALTY
        if sampling.logprobs is not None:
            need |= Need.LOGPROBS
        if start.bad_token_ids:
            need |= Need.BAD_WORDS
        return need

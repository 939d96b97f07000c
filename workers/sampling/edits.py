"""Changes to logits: `logit_bias`, `allowed_token_ids`, and `min_tokens` while it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedray.sampling_params import MAX_BAD_WORD_TOKENS
from workers.sampling.choice import IntArray, upload

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagedray.batch import SequenceStart

__all__ = [
    "BadWords",
    "Chains",
    "LogitEdits",
    "Penalties",
    "apply_masks",
    "num_mask_bytes",
    "penalize",
    "penalize_seen",
]

_LENGTH = MAX_BAD_WORD_TOKENS - 1
"""Tokens of an output that may begin a word."""
_NONE = -1
"""Stands for a token that the output does not have yet."""
_ANY = -2
"""Stands for a token that a word does not have."""
Strengths = NDArray[np.float32]

# Additions to the scores of eight tokens, for each byte of a mask. Adding -inf, rather than writing
# it, keeps a NaN visible.
_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)


class Chains:
    """The drafts among sampled rows: a row with a draft continues the chain of the row before it.

    The state of a row ends before the first token of its chain.
    """

    def __init__(self, draft_ids: IntArray) -> None:
        """`draft_ids` is `[num_rows]`: the token of each row that is a draft, -1 for others."""
        self._draft_ids = draft_ids
        order = np.arange(len(draft_ids))
        self.firsts = np.flatnonzero(draft_ids < 0)
        """The index of the first row of each chain; other rows are chains of their own."""
        self.lengths = np.diff(self.firsts, append=len(draft_ids))
        self.depths = order - np.repeat(self.firsts, self.lengths)
        """The number of drafts up to each row, in its chain."""

    def of(self, indices: IntArray) -> Chains:
        """Return some of the chains, each whole."""
        return Chains(self._draft_ids[indices])

    def contexts(self) -> IntArray:
        """Return the drafts up to each row in its chain, `[num_rows, most]`, then -1."""
        offsets = np.arange(self.depths.max())
        places = np.arange(len(self.depths)) - self.depths + 1
        found = self._draft_ids[np.minimum(places[:, None] + offsets, len(self.depths) - 1)]
        return np.where(offsets < self.depths[:, None], found, -1)

    def accepted(self, token_ids: Tensor) -> Tensor:
        """Return the sampled tokens of all rows, and -1 behind the first wrong draft of a chain."""
        if len(self.firsts) == len(self._draft_ids):
            return token_ids
        draft_ids = upload(self._draft_ids, token_ids.device)
        is_wrong = draft_ids.ge(0)
        is_wrong[1:] &= draft_ids[1:] != token_ids[:-1]
        num_wrong = is_wrong.cumsum(0)
        before = num_wrong[upload(np.repeat(self.firsts, self.lengths), token_ids.device)]
        return token_ids.masked_fill(num_wrong > before, -1)

    def num_tokens(self, token_ids: Tensor) -> IntArray:
        """Return how many sampled tokens each chain gives: the last follows its last right draft.

        `token_ids` are those of all rows, on the host.
        """
        is_accepted = self.accepted(token_ids).numpy() >= 0
        # The first token of a chain is sampled whatever it is.
        is_accepted[self.firsts] = True
        return np.add.reduceat(is_accepted, self.firsts, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _RowEdits:
    biased_ids: IntArray
    biases: NDArray[np.float32]
    ending_ids: IntArray
    allowed_ids: Tensor | None
    """The only tokens that are allowed, int64 on the device; None is all."""
    first_ending_position: int
    """The ending ids are allowed from this position."""

    def at(self, position: int) -> tuple[IntArray, NDArray[np.float32]]:
        """Return distinct token ids, and the amounts to add to their logits."""
        if position >= self.first_ending_position:
            return self.biased_ids, self.biases
        is_other = ~np.isin(self.biased_ids, self.ending_ids)
        ids = np.concatenate((self.biased_ids[is_other], self.ending_ids))
        forbidden = np.full(len(self.ending_ids), -np.inf, dtype=np.float32)
        return ids, np.concatenate((self.biases[is_other], forbidden))


class LogitEdits:
    """The edits of every row that has some."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._edits_by_row: dict[int, _RowEdits] = {}

    def start(self, start: SequenceStart) -> None:
        """Replace the edits of the row."""
        sampling = start.sampling
        ending_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending_ids |= set(start.eos_token_ids)
        # A tokenizer may have more tokens than the model has logits; their ids are out of range.
        biases = {i: bias for i, bias in sampling.logit_bias.items() if self._is_known(i)}
        num_unending = sampling.min_tokens
        if start.mask_start is not None:
            # Masks decide when the sequence may and must end.
            num_unending = min(num_unending, start.mask_start)
        allowed_ids = self._known(sampling.allowed_token_ids)
        self._edits_by_row[start.row] = _RowEdits(
            biased_ids=np.array(list(biases), dtype=np.int64),
            biases=np.array(list(biases.values()), dtype=np.float32),
            ending_ids=self._known(ending_ids),
            allowed_ids=upload(allowed_ids, self._device) if len(allowed_ids) else None,
            first_ending_position=start.num_prompt_tokens + num_unending,
        )

    def end(self, row: int) -> None:
        """Forget the row."""
        self._edits_by_row.pop(row, None)

    def apply(self, scores: Tensor, indices: IntArray, rows: IntArray, positions: IntArray) -> None:
        """Change `scores[indices]`, which belong to these rows and positions, in place."""
        score_parts, id_parts, value_parts = [], [], []
        for index, row, position in zip(
            indices.tolist(), rows.tolist(), positions.tolist(), strict=True
        ):
            ids, values = self._edits_by_row[row].at(position)
            score_parts.append(np.full(len(ids), index))
            id_parts.append(ids)
            value_parts.append(values)
        values = np.concatenate(value_parts)
        if len(values):
            where = upload(
                np.stack((np.concatenate(score_parts), np.concatenate(id_parts))), scores.device
            )
            # Adding -inf, rather than writing it, keeps a NaN visible.
            scores[where[0], where[1]] += upload(values, scores.device)
        for index, row in zip(indices.tolist(), rows.tolist(), strict=True):
            allowed_ids = self._edits_by_row[row].allowed_ids
            if allowed_ids is not None:
                _forbid_others(scores[index], allowed_ids)

    def _known(self, token_ids: Iterable[int]) -> IntArray:
        """Return the distinct ids that have logits, in order."""
        return np.array(sorted(set(filter(self._is_known, token_ids))), dtype=np.int64)

    def _is_known(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size


def _forbid_others(scores: Tensor, allowed_ids: Tensor) -> None:
    """Make all tokens but these impossible, in place; `scores` is `[vocab_size]`."""
    kept = scores[allowed_ids]
    scores += -np.inf
    scores[allowed_ids] = kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Words:
    """The words of several rows, on the device."""

    beginnings: Tensor
    """int32 `[num_words, _LENGTH]`: the tokens before the last token, after `_ANY`."""
    last_ids: Tensor
    """int64 `[num_words]`."""
    owners: Tensor
    """int64 `[num_words]`: the index of the word's row among the rows."""
    rows: Tensor
    """int64 `[num_words]`."""


class BadWords:
    """The bad words of every row that has some."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._words_by_row: dict[int, tuple[tuple[int, ...], ...]] = {}
        # Made in inference mode, it could not be written to outside of it.
        with torch.inference_mode(mode=False):
            self._last_tokens = torch.full(
                (max_num_rows, _LENGTH), _NONE, dtype=torch.int32, device=device
            )
        self._words: tuple[bytes, _Words] | None = None
        """The rows of the last step and their bad words; most steps have the same rows again."""

    def start(self, start: SequenceStart) -> None:
        """Replace the words of the row, and record the output with which it starts."""
        words = tuple(filter(self._is_known, start.bad_token_ids))
        self._words_by_row[start.row] = words
        self._words = None
        tokens = np.full(_LENGTH, _NONE, dtype=np.int32)
        output = np.frombuffer(start.token_ids, np.int32)[start.num_prompt_tokens :][-_LENGTH:]
        tokens[_LENGTH - len(output) :] = output
        self._last_tokens[start.row].copy_(upload(tokens, self._device))

    def end(self, row: int) -> None:
        """Forget the row."""
        if self._words_by_row.pop(row, None) is not None:
            self._words = None

    def apply(
        self, scores: Tensor, indices: IntArray, rows: IntArray, contexts: IntArray | None = None
    ) -> None:
        """Forbid the ends of words in `scores[indices]`, which belong to these rows, in place.

        `contexts` has the drafts before each score, as `Chains.contexts` returns them.
        """
        words = self._words_of(rows)
        if contexts is None:
            last_tokens = self._last_tokens[words.rows]
        else:
            last_tokens = self._last_tokens_after(rows, contexts)[words.owners]
        is_begun = (words.beginnings == _ANY) | (words.beginnings == last_tokens)
        # Adding -inf, rather than writing it, keeps a NaN visible.
        added = torch.zeros(len(words.last_ids), device=self._device)
        added.masked_fill_(is_begun.all(1), -torch.inf)
        where = (upload(indices, self._device)[words.owners], words.last_ids)
        scores.index_put_(where, added, accumulate=True)

    def append(self, rows: IntArray, token_ids: Tensor, chains: Chains) -> None:
        """Record the tokens just accepted for these rows, `[num_rows]`; -1 is none."""
        row_ids = upload(rows[chains.firsts], self._device)
        offsets = np.arange(chains.lengths.max())
        places = np.minimum(chains.firsts[:, None] + offsets, len(rows) - 1)
        is_other = upload(offsets >= chains.lengths[:, None], self._device)
        added = token_ids[upload(places, self._device)].masked_fill(is_other, _NONE).int()
        tokens = torch.cat((self._last_tokens[row_ids], added), dim=1)
        first = (added >= 0).sum(1, keepdim=True)
        columns = first + torch.arange(_LENGTH, device=self._device)
        self._last_tokens[row_ids] = tokens.gather(1, columns)

    def _last_tokens_after(self, rows: IntArray, contexts: IntArray) -> Tensor:
        """Return the last tokens of outputs with these drafts, `[num_rows, _LENGTH]`."""
        state = self._last_tokens[upload(rows, self._device)]
        tokens = torch.cat((state, upload(contexts.astype(np.int32), self._device)), dim=1)
        columns = (contexts >= 0).sum(1)[:, None] + np.arange(_LENGTH)
        return tokens.gather(1, upload(columns, self._device))

    def _words_of(self, rows: IntArray) -> _Words:
        key = rows.tobytes()
        if self._words is None or self._words[0] != key:
            self._words = key, self._upload(rows)
        return self._words[1]

    def _upload(self, rows: IntArray) -> _Words:
        table: list[tuple[int, ...]] = []
        for owner, row in enumerate(rows.tolist()):
            for word in self._words_by_row[row]:
                padding = (_ANY,) * (_LENGTH + 1 - len(word))
                table.append((owner, row, *padding, *word))
        words = np.array(table, dtype=np.int64).reshape(-1, _LENGTH + 3)
        owners, rows_of_words, last_ids = upload(words[:, [0, 1, -1]].T, self._device)
        return _Words(
            beginnings=upload(words[:, 2:-1].astype(np.int32), self._device),
            last_ids=last_ids,
            owners=owners,
            rows=rows_of_words,
        )

    def _is_known(self, word: tuple[int, ...]) -> bool:
        return all(0 <= token_id < self._vocab_size for token_id in word)


class Penalties:
    """The penalties of every row that has some."""

    def __init__(self, max_num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._output_counts = self._zeros(0, torch.int32)
        """`[max_num_rows, vocab_size]`, or empty before any row has had a penalty."""
        self._is_seen = self._zeros(0, torch.bool)
        self._strengths: Strengths = np.zeros((max_num_rows, 3), dtype=np.float32)

    def start(self, start: SequenceStart) -> None:
        """Replace the penalties of the row, and count the tokens with which it starts."""
        sampling = start.sampling
        if not len(self._is_seen):
            self._output_counts = self._zeros(len(self._strengths), torch.int32)
            self._is_seen = self._zeros(len(self._strengths), torch.bool)
        self._strengths[start.row] = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        token_ids = np.frombuffer(start.token_ids, np.int32)
        counts = self._output_counts[start.row].zero_()
        is_seen = self._is_seen[start.row].zero_()
        seen_ids = self._known(token_ids)
        if len(seen_ids):
            is_seen.index_fill_(0, upload(seen_ids, self._device), True)
        output_ids = self._known(token_ids[start.num_prompt_tokens :])
        if len(output_ids):
            output_ids, times = np.unique(output_ids, return_counts=True)
            counts[upload(output_ids, self._device)] = upload(times.astype(np.int32), self._device)

    def apply(
        self, scores: Tensor, indices: IntArray, rows: IntArray, contexts: IntArray | None = None
    ) -> None:
        """Penalize `scores[indices]`, which belong to these rows, in place.

        `contexts` has the drafts before each score, as `Chains.contexts` returns them.
        """
        if contexts is not None:
            # A draft without a logit is never accepted.
            contexts = np.where(contexts < self._vocab_size, contexts, -1)
        penalize_rows = penalize_seen if self._device.type == "cpu" else penalize
        penalize_rows(
            scores,
            indices,
            self._is_seen,
            self._output_counts,
            rows,
            self._strengths[rows],
            contexts,
        )

    def count(self, rows: IntArray, token_ids: Tensor) -> None:
        """Count the tokens just accepted for these rows, `[num_rows]`; -1 is none.

        A row may occur several times.
        """
        slots = upload(rows, self._device)
        is_token, token_ids = token_ids >= 0, token_ids.clamp(min=0)
        places = slots * self._vocab_size + token_ids
        self._output_counts.view(-1).index_add_(0, places, is_token.int())
        self._is_seen[slots, token_ids] |= self._output_counts[slots, token_ids] > 0

    def _zeros(self, num_rows: int, dtype: torch.dtype) -> Tensor:
        # Made in inference mode, it could not be written to outside of it.
        with torch.inference_mode(mode=False):
            return torch.zeros(num_rows, self._vocab_size, dtype=dtype, device=self._device)

    def _known(self, token_ids: NDArray[np.int32]) -> IntArray:
        # A placeholder, such as that of an image, has an id but no logit.
        ids = token_ids.astype(np.int64)
        return ids[(ids >= 0) & (ids < self._vocab_size)]


def penalize(
    scores: Tensor,
    indices: IntArray,
    is_seen: Tensor,
    output_counts: Tensor,
    slots: IntArray,
    strengths: Strengths,
    contexts: IntArray | None = None,
) -> None:
    """Penalize `scores[indices]` by these slots of the counts, in place, on any device.

    `strengths` is `[num_indices, 3]`: repetition, presence, frequency. `contexts` has tokens that
    follow the counted tokens, `[num_indices, most]`; -1 is none.
    """
    # [num_indices, 1] each.
    repetition, presence, frequency = upload(strengths, scores.device).unsqueeze(-1).unbind(1)
    index, slot = upload(np.stack((indices, slots)), scores.device)
    penalized, counts, seen = scores[index], output_counts[slot], is_seen[slot]
    if contexts is not None:
        owners, places = np.nonzero(contexts >= 0)
        owner, token = upload(np.stack((owners, contexts[owners, places])), scores.device)
        counts.view(-1).index_add_(0, owner * counts.shape[1] + token, torch.ones_like(owner).int())
        seen[owner, token] = True
    if (strengths[:, 0] != 1.0).any():
        weakened = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
        penalized = torch.where(seen, weakened, penalized)
    if strengths[:, 1].any():
        penalized -= (counts > 0) * presence
    if strengths[:, 2].any():
        penalized -= counts * frequency
    scores[index] = penalized


def penalize_seen(
    scores: Tensor,
    indices: IntArray,
    is_seen: Tensor,
    output_counts: Tensor,
    slots: IntArray,
    strengths: Strengths,
    contexts: IntArray | None = None,
) -> None:
    """Do the same on the CPU, in time that is proportional to the number of tokens seen."""
    score_rows, seen_rows, count_rows = scores.numpy(), is_seen.numpy(), output_counts.numpy()
    for place, (index, slot) in enumerate(zip(indices.tolist(), slots.tolist(), strict=True)):
        repetition, presence, frequency = strengths[place]
        seen, output = seen_rows[slot], count_rows[slot]
        if contexts is not None:
            context = contexts[place][contexts[place] >= 0]
            seen, output = seen.copy(), output.copy()
            seen[context] = True
            np.add.at(output, context, 1)
        ids = np.flatnonzero(seen)
        values, counts = score_rows[index, ids], output[ids].astype(np.float32)
        # An extreme penalty makes the scores of its own row infinite, which -1 reports.
        with np.errstate(all="ignore"):
            values = np.where(values > 0, values / repetition, values * repetition)
            score_rows[index, ids] = values - (counts > 0) * presence - counts * frequency


def num_mask_bytes(vocab_size: int) -> int:
    """Return the bytes of one mask: a bit a token, in whole words of 32."""
    return -(-vocab_size // 32) * 4


def apply_masks(scores: Tensor, indices: IntArray, words: bytes) -> None:
    """Forbid the tokens that the mask of each index does not allow in `scores[indices]`, in place.

    `scores` is `[num_scores, vocab_size]` float32; `pagedray.batch.StepMasks` describes the masks.
    """
    # On a little-endian machine bit i % 32 of word i // 32 is bit i % 8 of byte i // 8.
    masks = np.frombuffer(words, dtype=np.uint8).reshape(len(indices), -1)
    assert masks.shape[1] == num_mask_bytes(scores.shape[1])
    if scores.device.type == "cpu":
        _apply_on_cpu(scores, indices, masks)
        return
    bits = torch.arange(8, dtype=torch.uint8, device=scores.device)
    # A copy, since the bytes of a message cannot be written, which torch requires.
    is_allowed = (upload(masks.copy(), scores.device).unsqueeze(-1) >> bits) & 1
    is_forbidden = is_allowed.flatten(1)[:, : scores.shape[1]] == 0
    index = upload(indices, scores.device)
    added = torch.zeros(is_forbidden.shape, device=scores.device)
    scores.index_add_(0, index, added.masked_fill_(is_forbidden, -torch.inf))


def _apply_on_cpu(scores: Tensor, indices: IntArray, masks: NDArray[np.uint8]) -> None:
    rows = scores.numpy()
    for index, mask in zip(indices.tolist(), masks, strict=True):
        added = _ADDED.take(mask, axis=0).reshape(-1)[: rows.shape[1]]
        # An infinite score becomes a NaN, and the row is broken.
        with np.errstate(invalid="ignore"):
            rows[index] += added

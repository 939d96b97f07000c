"""Changes to logits: `logit_bias`, `allowed_token_ids`, and `min_tokens` while it holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from workers.sampling.arrays import IntArray, upload

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from pagedray.batch import SequenceStart

__all__ = ["LogitEdits"]


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

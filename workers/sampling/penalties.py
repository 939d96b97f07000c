"""Repetition, presence and frequency penalties, and the token counts that they need.

The repetition penalty comes from CTRL (Keskar et al., 2019), with the sign rule of transformers;
the others come from OpenAI's API. Counts of all rows are allocated on the device when the first row
has a penalty: tables that grow would leave the allocator with fragments of their former sizes.
`penalize` computes the penalties of the whole vocabulary; on a CPU, `penalize_seen` computes only
the penalties of seen tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.sampling.arrays import IntArray, upload

if TYPE_CHECKING:
    from pagedray.batch import SequenceStart

__all__ = ["Penalties", "penalize", "penalize_seen"]


Strengths = NDArray[np.float32]


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

    def apply(self, scores: Tensor, indices: IntArray, rows: IntArray) -> None:
        """Penalize `scores[indices]`, which belong to these rows, in place."""
        strengths = self._strengths[rows]
        if self._device.type == "cpu":
            penalize_seen(scores, indices, self._is_seen, self._output_counts, rows, strengths)
        else:
            penalize(scores, indices, self._is_seen, self._output_counts, rows, strengths)

    def count(self, rows: IntArray, token_ids: Tensor) -> None:
        """Count the tokens just sampled for these rows, `[num_rows]`; -1 is none."""
        slots = upload(rows, self._device)
        is_token, token_ids = token_ids >= 0, token_ids.clamp(min=0)
        self._output_counts[slots, token_ids] += is_token
        self._is_seen[slots, token_ids] |= is_token

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
) -> None:
    """Penalize `scores[indices]` by these slots of the counts, in place, on any device.

    `strengths` is `[num_indices, 3]`: repetition, presence, frequency.
    """
    # [num_indices, 1] each.
    repetition, presence, frequency = upload(strengths, scores.device).unsqueeze(-1).unbind(1)
    index, slot = upload(np.stack((indices, slots)), scores.device)
    penalized, counts = scores[index], output_counts[slot]
    if (strengths[:, 0] != 1.0).any():
        weakened = torch.where(penalized > 0, penalized / repetition, penalized * repetition)
        penalized = torch.where(is_seen[slot], weakened, penalized)
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
) -> None:
    """Do the same on the CPU, in time that is proportional to the number of tokens seen."""
    score_rows, seen_rows, count_rows = scores.numpy(), is_seen.numpy(), output_counts.numpy()
    for index, slot, strength in zip(indices.tolist(), slots.tolist(), strengths, strict=True):
        repetition, presence, frequency = strength
        ids = np.flatnonzero(seen_rows[slot])
        values, counts = score_rows[index, ids], count_rows[slot, ids].astype(np.float32)
        # An extreme penalty makes the scores of its own row infinite, which -1 reports.
        with np.errstate(all="ignore"):
            values = np.where(values > 0, values / repetition, values * repetition)
            score_rows[index, ids] = values - (counts > 0) * presence - counts * frequency

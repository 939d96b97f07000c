"""The choice on a GPU, in a few launches, without a sort and without waiting for the device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from attention.kernels.triton.choice import (
    choose_filtered,
    choose_greedy,
    choose_unfiltered,
    find_leaders,
    take_leaders,
)
from attention.kernels.triton.choice.scores import NUM_PARAMETERS
from workers.sampling.choice import Choice, Draws
from workers.sampling.torch_choice import TorchChoice

if TYPE_CHECKING:
    from torch import Tensor

    from workers.sampling.arrays import IntArray
    from workers.sampling.uploader import Uploader

__all__ = ["TritonChoice"]


class TritonChoice(Choice):
    """Chooses from scores on a GPU. Weights are rounded to integers, so that sums are exact."""

    def __init__(
        self, uploader: Uploader, *, capacity: int = 8192, sample_size: int = 2048
    ) -> None:
        """Guess from `sample_size` tokens of a row where its cuts lie; sort at most `capacity`."""
        self._uploader = uploader
        self._capacity = capacity
        self._sample_size = sample_size
        self._sorting = TorchChoice()
        self._order = torch.empty(0, dtype=torch.int64, device=uploader.device)

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        """Return the most likely tokens."""
        if len(indices) == len(scores) and (indices == np.arange(len(indices))).all():
            return choose_greedy(scores, self._in_order(scores))
        return choose_greedy(scores, self._uploader.upload(indices))

    def leaders(self, scores: Tensor, first_id: int) -> Tensor:
        """Return the leader of every row, int64 `[num_scores]`."""
        if not scores.shape[1]:
            return super().leaders(scores, first_id)
        return find_leaders(scores, self._in_order(scores), first_id)

    def tokens_of(self, leaders: Tensor) -> Tensor:
        """Return the most likely tokens from leaders of all parts, int64 `[num_rows, parts]`."""
        return take_leaders(leaders)

    def unfiltered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        """Return tokens drawn from the whole vocabulary."""
        return choose_unfiltered(scores, *_parameters(self._uploader, indices, draws))

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        """Return tokens drawn after min_p, top_k and top_p."""
        return choose_filtered(
            scores,
            *_parameters(self._uploader, indices, draws),
            capacity=self._capacity,
            sample_size=self._sample_size,
        )

    def top_tokens(self, scores: Tensor, num_tokens: int) -> Tensor:
        """Return the most likely tokens of each row, in order, int64 `[num_scores, num_tokens]`."""
        return self._sorting.top_tokens(scores, num_tokens)

    def _in_order(self, scores: Tensor) -> Tensor:
        """Return the indices of all rows, which are made once."""
        if len(self._order) < len(scores):
            self._order = torch.arange(len(scores), device=self._uploader.device)
        return self._order[: len(scores)]


def _parameters(uploader: Uploader, indices: IntArray, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return the indices and the kernels' parameters of the draws, in a single copy."""
    with np.errstate(divide="ignore"):
        floor = draws.temperature * np.log(draws.min_p)
    num_rows = len(indices)
    # The parameters begin at a multiple of 16 bytes: for another alignment Triton would compile
    # every kernel again.
    first = num_rows + num_rows % 2
    columns = np.empty(first + NUM_PARAMETERS * num_rows)
    columns[:num_rows] = indices.view(np.float64)
    columns[first:] = np.concatenate(
        (math.log2(math.e) / draws.temperature, draws.top_k, draws.top_p, floor, draws.uniform)
    )
    uploaded = uploader.upload(columns)
    parameters = uploaded[first:].view(NUM_PARAMETERS, num_rows)
    return uploaded[:num_rows].view(torch.int64), parameters

"""The choice of a token on a GPU, without waiting for the device.

`TritonChoice` takes a few launches and does not sort; `TorchChoice` is its plain version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from attention.gpu.batch import PinnedRing, copy_from_host
from attention.kernels.triton.choice import (
    argmax,
    choose_filtered,
    choose_greedy,
    choose_unfiltered,
    local_maxima,
)
from attention.kernels.triton.choice.scores import NUM_PARAMETERS
from attention.kernels.triton.draft_rows import key_drafts
from workers.sampling.choice import Choice, Draws, IntArray, select_rows, upload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TorchChoice", "TritonChoice", "Uploader", "upload_draws"]

# Up to here selecting the first tokens is cheaper than sorting all.
MOST_SELECTED = 1024

_NUM_ORDERED = 1024
"""Rows up to which the indices of rows are made at once."""
_NUM_BUFFERS = 32
"""More than the uploads of two steps: the host may be one step ahead of the device."""
_WORD_BYTES = 8


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
        self._orders: list[Tensor] = []

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        if len(indices) == len(scores) and (indices == np.arange(len(indices))).all():
            return choose_greedy(scores, self._in_order(scores))
        return choose_greedy(scores, self._uploader.upload(indices))

    def local_maxima(self, scores: Tensor, first_id: int) -> Tensor:
        """Return the maximum of every row, int64 `[num_scores]`."""
        if not scores.shape[1]:
            return super().local_maxima(scores, first_id)
        return local_maxima(scores, self._in_order(scores), first_id)

    def tokens_of(self, local_maxima: Tensor) -> Tensor:
        return argmax(local_maxima)

    def drawn_maxima(
        self, scores: Tensor, indices: IntArray, draws: Draws, first_id: int
    ) -> Tensor:
        if not scores.shape[1]:
            return super().local_maxima(scores[: len(indices)], first_id)
        order, parameters = upload_draws(self._uploader, indices, draws)
        return local_maxima(scores, order, first_id, parameters)

    def unfiltered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        return choose_unfiltered(scores, *upload_draws(self._uploader, indices, draws))

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        return choose_filtered(
            scores,
            *upload_draws(self._uploader, indices, draws),
            capacity=self._capacity,
            sample_size=self._sample_size,
        )

    def top_tokens(self, scores: Tensor, num_tokens: int) -> Tensor:
        return self._sorting.top_tokens(scores, num_tokens)

    def _in_order(self, scores: Tensor) -> Tensor:
        """Return the indices of all rows, which are made once."""
        if len(self._order) < len(scores):
            size = max(len(scores), _NUM_ORDERED)
            self._order = torch.arange(size, device=self._uploader.device)
            # Captured graphs read the indices that they were captured with.
            self._orders.append(self._order)
        return self._order[: len(scores)]


def upload_draws(uploader: Uploader, indices: IntArray, draws: Draws) -> tuple[Tensor, Tensor]:
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
        (1.0 / draws.temperature, draws.top_k, draws.top_p, floor, draws.key.view(np.float64))
    )
    uploaded = uploader.upload(columns)
    parameters = uploaded[first:].view(NUM_PARAMETERS, num_rows)
    if draws.positions is not None:
        keys = parameters[-1].view(torch.int64)
        key_drafts(keys, starts=keys, positions=draws.positions, number=0)
    return uploaded[:num_rows].view(torch.int64), parameters


class TorchChoice(Choice):
    """Chooses from scores on any device."""

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        scores = select_rows(scores, indices)
        token_ids = scores.argmax(dim=-1, keepdim=True)
        # argmax finds a NaN before any number.
        is_sound = scores.gather(1, token_ids).isfinite()
        return token_ids.masked_fill_(~is_sound, -1).squeeze(1)

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        scores = select_rows(scores, indices).float()
        temperature, top_k, top_p, min_p = _columns(
            scores.device, draws.temperature, draws.top_k, draws.top_p, draws.min_p
        )
        highest = scores.amax(dim=-1, keepdim=True)
        ids = self.top_tokens(scores, int(draws.top_k.max()))
        weights = scores.gather(1, ids).double().sub_(highest).div_(temperature).exp_()
        positions = torch.arange(ids.shape[1], device=scores.device)
        weights = weights.masked_fill_((positions >= top_k) | (weights < min_p), 0.0)
        sums = weights.cumsum(dim=-1)  # [num_rows, num_tokens]
        before = functional.pad(sums[:, :-1], (1, 0))
        is_kept = (weights > 0.0) & (before < top_p * sums[:, -1:])
        # A broken row stays whole, as its sums have no meaning.
        kept = torch.where(highest.isfinite(), -torch.inf, scores)
        found = torch.where(is_kept, scores.gather(1, ids), kept.gather(1, ids))
        kept.scatter_(1, ids, found)
        local_maxima = self.drawn_maxima(kept, np.arange(len(indices)), draws, 0)
        return self.tokens_of(local_maxima.unsqueeze(1))

    def top_tokens(self, scores: Tensor, num_tokens: int) -> Tensor:
        if num_tokens > MOST_SELECTED:
            order = scores.sort(dim=-1, descending=True, stable=True).indices
            return order[:, :num_tokens]
        # topk guarantees no order of ties, so the id becomes part of the key. A float's bits sort
        # like the float if the bits of negative floats are inverted; adding zero makes -0.0 and 0.0
        # the same.
        bits = (scores.float() + 0.0).view(torch.int32).long()
        bits ^= (bits >> 31) & 0x7FFFFFFF
        last_id = scores.shape[1] - 1
        reversed_ids = torch.arange(last_id, -1, -1, device=scores.device)
        keys = (bits << 32).bitwise_or_(reversed_ids).topk(num_tokens, dim=-1).values
        return last_id - (keys & 0xFFFFFFFF)


def _columns(device: torch.device, *arrays: np.ndarray) -> tuple[Tensor, ...]:
    """Return the arrays as float64 columns `[num_rows, 1]` on the device, in one copy."""
    columns = upload(np.stack(arrays, dtype=np.float64), device)
    return columns.unsqueeze(-1).unbind(0)


class Uploader:
    """Uploads arrays to one device, without waiting for it or for copies of blocks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ring = PinnedRing(device, num_buffers=_NUM_BUFFERS)

    def upload(self, array: NDArray[Any]) -> torch.Tensor:  # Any: element types of 8 bytes
        """Return an array of int64 or float64 as a tensor of its shape on the device."""
        array = np.ascontiguousarray(array)
        tensor = torch.from_numpy(array)
        assert array.itemsize == _WORD_BYTES
        if self.device.type == "cpu":
            return tensor
        uploaded = torch.empty(array.size, dtype=torch.int64, device=self.device)
        with self._ring.next_buffer(array.size) as words:
            words.numpy()[:] = array.reshape(-1).view(np.int64)
            copy_from_host(uploaded, words)
        return uploaded.view(tensor.dtype).view(array.shape)

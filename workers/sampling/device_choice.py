"""The choice of a token on a GPU, without waiting for the device.

`TritonChoice` takes a few launches and does not sort; `TorchChoice` is its plain version.
"""

from __future__ import annotations

import math
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
from workers.sampling.choice import CHUNK_SIZE, Choice, Draws, IntArray, select_rows, upload

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["TorchChoice", "TritonChoice", "Uploader"]

# Up to here selecting the first tokens is cheaper than sorting all.
MOST_SELECTED = 1024

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

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        """Return the most likely tokens."""
        if len(indices) == len(scores) and (indices == np.arange(len(indices))).all():
            return choose_greedy(scores, self._in_order(scores))
        return choose_greedy(scores, self._uploader.upload(indices))

    def local_maxima(self, scores: Tensor, first_id: int) -> Tensor:
        """Return the maximum of every row, int64 `[num_scores]`."""
        if not scores.shape[1]:
            return super().local_maxima(scores, first_id)
        return local_maxima(scores, self._in_order(scores), first_id)

    def tokens_of(self, local_maxima: Tensor) -> Tensor:
        """Return the likeliest tokens from local maxima of all parts, int64 `[num_rows, parts]`."""
        return argmax(local_maxima)

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


class TorchChoice(Choice):
    """Chooses from scores on any device."""

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        """Return the most likely tokens."""
        scores = select_rows(scores, indices)
        token_ids = scores.argmax(dim=-1, keepdim=True)
        # argmax finds a NaN before any number.
        is_sound = scores.gather(1, token_ids).isfinite()
        return token_ids.masked_fill_(~is_sound, -1).squeeze(1)

    def unfiltered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        """Return tokens drawn from the whole vocabulary."""
        scores = select_rows(scores, indices)
        num_rows, vocab_size = scores.shape
        temperature, uniform = _columns(scores.device, draws.temperature, draws.uniform)
        num_chunks = -(-vocab_size // CHUNK_SIZE)
        padding = num_chunks * CHUNK_SIZE - vocab_size
        weights = functional.pad(scores.float(), (0, padding), value=-torch.inf)
        weights = weights - weights.amax(dim=-1, keepdim=True)
        weights = weights.div_(temperature.float()).exp_()
        chunks = weights.view(num_rows, num_chunks, CHUNK_SIZE)
        sums = chunks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)  # [num_rows, num_chunks]
        total = sums[:, -1:]
        target = uniform * total
        chunk = (sums <= target).sum(dim=-1, keepdim=True)
        before = functional.pad(sums, (1, 0)).gather(1, chunk)
        where = chunk.unsqueeze(-1).expand(-1, -1, CHUNK_SIZE)
        inside = chunks.gather(1, where).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
        # The chunk's sum may have been rounded otherwise: a point beyond falls to the last token
        # with weight.
        offset = torch.minimum(
            (inside <= target - before).sum(dim=-1, keepdim=True),
            (inside < inside[:, -1:]).sum(dim=-1, keepdim=True),
        )
        token_ids = chunk * CHUNK_SIZE + offset
        # One NaN makes the total NaN, and so does a highest score that is infinite.
        return token_ids.masked_fill_(~total.isfinite(), -1).squeeze(1)

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        """Return tokens drawn after min_p, top_k and top_p."""
        scores = select_rows(scores, indices).float()
        temperature, top_k, top_p, min_p, uniform = _columns(
            scores.device, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform
        )
        highest = scores.amax(dim=-1, keepdim=True)
        ids = self.top_tokens(scores, int(draws.top_k.max()))
        weights = scores.gather(1, ids).double().sub_(highest).div_(temperature).exp_()
        positions = torch.arange(ids.shape[1], device=scores.device)
        weights = weights.masked_fill_((positions >= top_k) | (weights < min_p), 0.0)
        sums = weights.cumsum(dim=-1)  # [num_rows, num_tokens]
        before = functional.pad(sums[:, :-1], (1, 0))
        num_kept = (before < top_p * sums[:, -1:]).sum(dim=-1, keepdim=True)
        # Before the broken rows are marked, theirs may be 0.
        total = sums.gather(1, (num_kept - 1).clamp_(min=0))
        position = (sums <= uniform * total).sum(dim=-1, keepdim=True).clamp_(max=ids.shape[1] - 1)
        token_ids = ids.gather(1, position)
        return token_ids.masked_fill_(~highest.isfinite(), -1).squeeze(1)

    def top_tokens(self, scores: Tensor, num_tokens: int) -> Tensor:
        """Return the most likely tokens of each row, in order, int64 `[num_scores, num_tokens]`."""
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

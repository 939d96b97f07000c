"""How a token is chosen from a row of scores: the definition that every implementation follows.

Scores are the logits after bias, masks and penalties. The tokens of a row are *ordered* by score,
and tokens with equal scores by token id, the lower id first. The most likely token, the k most
likely tokens, and the tokens that reach a probability are therefore always well defined.

1. Greedy takes the first token. Otherwise a token's weight is exp((score - highest) / temperature).
2. min_p (Nguyen et al., 2024) keeps tokens of a weight of `min_p` and more; the most likely token
   has weight 1.
3. top_k keeps the first k tokens.
4. top_p (nucleus sampling; Holtzman et al., 2020) keeps the first tokens, up to the one at which
   the sum of weights reaches `top_p` of the weight of all that steps 2 and 3 kept.
5. The sampled token is the kept token with the highest sum of score / temperature and its noise,
   as defined by `workers.sampling.noise`: the Gumbel-max trick (Maddison et al., 2014), which draws
   a token in proportion to its weight. Of equal sums, it is the lowest id. The sum is computed in
   float32, as float32(score) * float32(1 / temperature) + noise, rounded twice.

Every implementation computes step 5 to the last bit. Where a sum of weights meets `top_p` within
rounding, implementations may keep one token more or less, which seldom changes the sampled token.

A row's *local maximum* is one int64 for its first token and that token's score, or for the token of
the highest sum and that sum: of the local maxima of several parts of a vocabulary, the largest is
that of the whole.

A row is *broken* if a score, or a score over the temperature, is NaN or +inf, or all are -inf; it
gives -1, and no other row is touched. A token of score -inf is never chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.sampling.noise import noise

__all__ = ["Choice", "Draws", "IntArray", "select_rows", "upload"]

_LAST = 0x7FFFFFFF
"""The key of NaN, which is larger than that of any score, and the largest id."""
_INFINITE_SCORE = 0x7F800000
_NO_SCORE = -0x7F800001
_NO_LEADER = -(1 << 63)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """How the tokens of some rows are drawn, `[num_rows]` each, on the host."""

    temperature: FloatArray
    top_k: IntArray
    """Number of tokens to choose from, 1 to the size of the vocabulary."""
    top_p: FloatArray
    min_p: FloatArray
    key: IntArray
    """Keys of the noise; with `positions`, the starts of the generators."""
    positions: Tensor | None = None
    """Positions of the tokens, int64 on the device, if only the device knows them."""

    @property
    def scale(self) -> NDArray[np.float32]:
        """The factor of scores, 1 / temperature."""
        return (1.0 / self.temperature).astype(np.float32)

    def of_rows(self, rows: slice | IntArray) -> Draws:
        """Return how the tokens of these rows are drawn."""
        assert self.positions is None
        names = [field.name for field in fields(self) if field.name != "positions"]
        return Draws(**{name: getattr(self, name)[rows] for name in names})


class Choice(ABC):
    """One way to compute the definition above.

    `scores` is `[num_scores, vocab_size]` in any float dtype and is left as it is; `indices` are
    the rows to sample from; tokens are returned as int64 `[len(indices)]` on its device.
    """

    @abstractmethod
    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        """Return the most likely tokens."""

    def local_maxima(self, scores: Tensor, first_id: int) -> Tensor:
        """Return the maximum of every row, int64 `[num_scores]`.

        `scores` belong to the tokens from `first_id` on.
        """
        if not scores.shape[1]:
            return torch.full((len(scores),), _NO_LEADER, dtype=torch.int64, device=scores.device)
        # argmax finds a NaN before any number, and otherwise the lowest id.
        ids = scores.argmax(dim=-1, keepdim=True)
        # -0.0 and 0.0 are equal scores.
        highest = scores.gather(1, ids).float() + 0.0
        bits = highest.view(torch.int32).long()
        # The bits of a float sort like the float if the bits of negative floats are inverted.
        keys = bits ^ ((bits >> 31) & _LAST)
        keys.masked_fill_(highest.isnan(), _LAST)
        return ((keys << 32) | (_LAST - first_id - ids)).squeeze(1)

    def tokens_of(self, local_maxima: Tensor) -> Tensor:
        """Return the likeliest tokens from local maxima of all parts, int64 `[num_rows, parts]`."""
        maximum = local_maxima.amax(dim=1)
        key = maximum >> 32
        is_sound = (key > _NO_SCORE) & (key < _INFINITE_SCORE)
        return torch.where(is_sound, _LAST - (maximum & 0xFFFFFFFF), -1)

    def drawn_maxima(
        self, scores: Tensor, indices: IntArray, draws: Draws, first_id: int
    ) -> Tensor:
        """Return the local maxima of scores over temperatures with noise, `[len(indices)]`."""
        device = scores.device
        ids = torch.arange(first_id, first_id + scores.shape[1], device=device)
        sums = select_rows(scores, indices).float() * upload(draws.scale, device).unsqueeze(1)
        return Choice.local_maxima(self, sums + noise(upload(draws.key, device), ids), first_id)

    def unfiltered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        """Return tokens drawn from the whole vocabulary."""
        return self.tokens_of(self.drawn_maxima(scores, indices, draws, 0).unsqueeze(1))

    @abstractmethod
    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        """Return tokens drawn after min_p, top_k and top_p."""

    @abstractmethod
    def top_tokens(self, scores: Tensor, num_tokens: int) -> Tensor:
        """Return the most likely tokens of each row, in order, int64 `[num_scores, num_tokens]`."""


def upload(array: NDArray[Any], device: torch.device) -> Tensor:  # Any: every element type
    """Return the array as a tensor on `device`; does not synchronize with it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    # A copy from pageable memory would synchronize with the device.
    return tensor.pin_memory().to(device, non_blocking=True)


def select_rows(matrix: Tensor, indices: IntArray) -> Tensor:
    """Return these rows of the matrix, or the matrix itself for all rows in order."""
    if len(indices) == len(matrix):
        return matrix
    return matrix.index_select(0, upload(indices, matrix.device))

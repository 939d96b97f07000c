"""The masks of a step: which tokens a row may sample at all.

They are applied after everything else that changes scores, so that nothing can bring a forbidden
token back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.sampling.arrays import IntArray, upload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["apply_masks", "num_mask_bytes"]

# Additions to the scores of eight tokens, for each byte of a mask. Adding -inf, rather than writing
# it, keeps a NaN visible.
_ADDED = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"),
    np.float32(0.0),
    np.float32(-np.inf),
)


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

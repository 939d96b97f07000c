"""The positions of the tokens of whole texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["text_positions"]


def text_positions(
    token_ids: NDArray[np.int64], lengths: NDArray[np.int32], *, padding_id: int | None = None
) -> NDArray[np.int64]:
    """Return the position of each token in its own text, `[num_tokens]`.

    `token_ids` is `[num_tokens]`, the texts one after another; `lengths` is `[num_texts]`. Without
    a `padding_id` positions count from 0. With a `padding_id` they follow RoBERTa (Liu et al.
    2019): they count from `padding_id + 1`, and padding tokens, which are not counted, have
    position `padding_id`.
    """
    starts = np.cumsum(lengths) - lengths
    if padding_id is None:
        return np.arange(len(token_ids)) - np.repeat(starts, lengths)
    is_text = token_ids != padding_id
    counts = np.cumsum(is_text)
    counted_before = (counts - is_text)[starts]
    within = counts - np.repeat(counted_before, lengths)
    return np.where(is_text, padding_id + within, padding_id)

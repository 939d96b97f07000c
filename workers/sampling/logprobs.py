"""Log-probabilities of the raw logits, before anything that sampling does to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedray.batch import TokenLogprobs
from workers.sampling.arrays import IntArray, select_rows

if TYPE_CHECKING:
    from workers.sampling.choice import Choice

__all__ = ["RawLogprobs"]


class RawLogprobs:
    """The log-probabilities of some rows of logits, and their likeliest tokens."""

    def __init__(
        self, logits: Tensor, indices: IntArray, num_likeliest: IntArray, choice: Choice
    ) -> None:
        logits = select_rows(logits, indices).float()
        self._num_likeliest = num_likeliest
        self._likeliest = choice.ranked(logits, int(num_likeliest.max()))
        self._logprobs = torch.log_softmax(logits, dim=-1)

    def report(self, token_ids: Tensor) -> list[TokenLogprobs | None]:
        """Return the report on each chosen token, `[num_rows]`; None where it is -1.

        Waits for the device.
        """
        chosen = self._logprobs.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
        likeliest = self._logprobs.gather(1, self._likeliest)
        return [
            TokenLogprobs(chosen=logprob, token_ids=ids[:num], logprobs=logprobs[:num])
            if token_id >= 0
            else None
            for token_id, logprob, ids, logprobs, num in zip(
                token_ids.tolist(),
                chosen.tolist(),
                self._likeliest.tolist(),
                likeliest.tolist(),
                self._num_likeliest.tolist(),
                strict=True,
            )
        ]

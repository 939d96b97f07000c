"""Log-probabilities of the raw logits, before anything that sampling does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagedray.batch import TokenLogprobs
from workers.device_event import DeviceEvent, record_event
from workers.sampling.arrays import IntArray, select_rows, upload

if TYPE_CHECKING:
    from workers.sampling.choice import Choice

__all__ = ["LogprobReports", "RawLogprobs"]


class RawLogprobs:
    """The log-probabilities of some rows of logits, and the tokens of which they are reported."""

    def __init__(
        self,
        logits: Tensor,
        indices: IntArray,
        num_reported: IntArray,
        reported_ids: IntArray,
        choice: Choice,
    ) -> None:
        """The most likely tokens are reported where `reported_ids`, `[num_rows, any]`, has none."""
        logits = select_rows(logits, indices).float()
        self._num_reported = num_reported
        self._reported = choice.top_tokens(logits, int(num_reported.max()))
        if reported_ids.size:
            self._reported = _replaced(self._reported, reported_ids)
        self._logprobs = torch.log_softmax(logits, dim=-1)

    def report(self, token_ids: Tensor) -> LogprobReports:
        """Start copying the reports on the chosen tokens, `[num_rows]`, to the host."""
        chosen = self._logprobs.gather(1, token_ids.clamp(min=0).unsqueeze(1)).squeeze(1)
        reported = self._logprobs.gather(1, self._reported)
        # The copies go to pinned memory.
        return LogprobReports(
            token_ids=token_ids.to("cpu", non_blocking=True),
            chosen=chosen.to("cpu", non_blocking=True),
            reported=self._reported.to("cpu", non_blocking=True),
            logprobs=reported.to("cpu", non_blocking=True),
            num_reported=self._num_reported,
            copied=record_event(token_ids.device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogprobReports:
    """Reports on the chosen tokens of some rows, on their way to the host."""

    token_ids: Tensor
    chosen: Tensor
    reported: Tensor
    logprobs: Tensor
    num_reported: IntArray
    copied: DeviceEvent

    def as_list(self) -> list[TokenLogprobs | None]:
        """Return the report of each row, None where its token is -1; waits for the copies."""
        self.copied.synchronize()
        return [
            TokenLogprobs(chosen=logprob, token_ids=ids[:num], logprobs=logprobs[:num])
            if token_id >= 0
            else None
            for token_id, logprob, ids, logprobs, num in zip(
                self.token_ids.tolist(),
                self.chosen.tolist(),
                self.reported.tolist(),
                self.logprobs.tolist(),
                self.num_reported.tolist(),
                strict=True,
            )
        ]


def _replaced(token_ids: Tensor, others: IntArray) -> Tensor:
    """Return tokens, replaced by `others` where these are not -1."""
    padded = np.full(token_ids.shape, -1)
    padded[:, : others.shape[1]] = others
    given = upload(padded, token_ids.device)
    return torch.where(given >= 0, given, token_ids)

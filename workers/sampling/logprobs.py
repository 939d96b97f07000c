"""Log-probabilities of the raw logits, before anything that sampling does to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pagedray.batch import PromptLogprobs, TokenLogprobs
from workers.device_event import DeviceEvent, record_event
from workers.sampling.choice import Choice, IntArray, select_rows, upload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


__all__ = ["LogprobReports", "PromptChunk", "PromptReport", "RawLogprobs", "describe_prompts"]

_MAX_ROWS = 64
"""Rows of logits that are in memory at once."""


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptChunk:
    """Tokens of a prompt with log-probabilities in a step, from the tokens before them."""

    row: int
    first_position: int
    token_ids: Tensor
    """`[num_tokens]` int64, on the device."""
    num_likeliest: int


@dataclass(frozen=True, slots=True, eq=False)
class PromptReport:
    """The report of a chunk, on its way to the host."""

    chunk: PromptChunk
    chosen: Tensor
    ranks: Tensor
    token_ids: Tensor
    logprobs: Tensor

    def as_message(self) -> PromptLogprobs:
        """Return the report; the step's event must have been synchronized."""
        return PromptLogprobs(
            row=self.chunk.row,
            first_position=self.chunk.first_position,
            num_likeliest=self.token_ids.shape[1],
            chosen=self.chosen.numpy().tobytes(),
            ranks=self.ranks.numpy().tobytes(),
            token_ids=self.token_ids.numpy().tobytes(),
            logprobs=self.logprobs.numpy().tobytes(),
        )


def describe_prompts(
    chunks: Sequence[PromptChunk],
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    choice: Choice,
) -> list[PromptReport]:
    """Start copying reports on all chunks to the host.

    `hidden` is `[num_tokens, hidden_size]`, the tokens of all chunks in order, each at the position
    before the token that it describes. `logits_of` returns `[num_rows, vocab_size]`; all ranks of a
    group call it alike.
    """
    reports: list[PromptReport] = []
    for chunk, states in zip(
        chunks, hidden.split([len(chunk.token_ids) for chunk in chunks]), strict=True
    ):
        parts = [
            _describe(logits_of(rows), token_ids, chunk.num_likeliest, choice)
            for rows, token_ids in zip(
                states.split(_MAX_ROWS), chunk.token_ids.split(_MAX_ROWS), strict=True
            )
        ]
        columns = zip(*parts, strict=True)
        # The copies go to pinned memory.
        copies = [torch.cat(column).to("cpu", non_blocking=True) for column in columns]
        reports.append(PromptReport(chunk, *copies))
    return reports


def _describe(
    logits: Tensor, token_ids: Tensor, num_likeliest: int, choice: Choice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log-probabilities and ranks of tokens, and the most likely tokens and theirs."""
    logits = logits.float()
    own = logits.gather(1, token_ids.unsqueeze(1))
    ranks = (logits > own).sum(dim=1, dtype=torch.int32) + 1
    likeliest = choice.top_tokens(logits, min(num_likeliest, logits.shape[1]))
    total = logits.logsumexp(dim=1, keepdim=True)
    return (
        (own - total).squeeze(1),
        ranks,
        likeliest.to(torch.int32),
        logits.gather(1, likeliest) - total,
    )

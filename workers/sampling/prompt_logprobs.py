"""Log-probabilities of the tokens of prompts, a few rows of logits at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagedray.batch import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.sampling.choice import Choice

__all__ = ["PromptChunk", "PromptReport", "describe_prompts"]

_MAX_ROWS = 64
"""Rows of logits that are in memory at once."""


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

"""The matcher of one sequence, in the process that makes masks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from cluster.structured.processes.memory_limit import is_out_of_memory
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from cluster.structured.processes.cpu_budgets import CpuBudget
    from cluster.structured.processes.messages import MaskQuery, MatcherStart
    from cluster.structured.token_matchers import TokenMatcher

__all__ = ["BASE_CPU_S", "REJECTED_TOKEN", "SequenceMatcher", "allowed_cpu_s"]

BASE_CPU_S = 0.5
"""CPU time that a sequence may take for its masks, in addition to that of its tokens."""
_TOKEN_CPU_S = 0.01
"""CPU time that each token allows."""
_REPLAYED_TOKEN_CPU_S = 0.0001
"""CPU time that a replayed token allows, in addition to the sequence's earlier time."""
REJECTED_TOKEN = "the grammar rejected a token"
"""The error of a sequence with a mask that allowed a token that its grammar rejects."""
_BUDGET_ERROR = "the CPU time for masks of its tenant is exhausted"


def allowed_cpu_s(query: MaskQuery) -> float:
    """Return the CPU time that the tokens of a query allow.

    To replay tokens to a new process takes 1 to 5 us each, or, for an ambiguous grammar, about as
    long as they took the first time, most of which is not making masks.
    """
    if query.start is None:
        return _TOKEN_CPU_S * len(query.token_ids)
    return _REPLAYED_TOKEN_CPU_S * len(query.token_ids) + query.start.cpu_s


class SequenceMatcher:
    """Follows one sequence through its grammar, within limits of CPU time."""

    def __init__(
        self,
        matcher: TokenMatcher,
        start: MatcherStart,
        vocab_size: int,
        budget_of: Callable[[], CpuBudget],
    ) -> None:
        """`budget_of` returns the budget that the current step is charged to."""
        self._matcher = matcher
        self._budget_of = budget_of
        self._min_tokens = start.min_tokens
        self._num_tokens = 0
        has_eos = start.ignores_eos and start.eos_token_ids
        self._eos = _bits(start.eos_token_ids, vocab_size) if has_eos else None
        self._early = (
            _bits((*start.eos_token_ids, *start.stop_token_ids), vocab_size)
            if start.min_tokens
            else None
        )
        self._was_queried = False
        self.cpu_s = start.cpu_s
        """CPU time taken in total."""
        self.last_cpu_s = 0.0
        """CPU time of the last mask."""
        self._finish_reason: FinishReason | None = None
        self.error = ""
        """Why the sequence ended with an error; empty if it did not."""

    @property
    def is_free(self) -> bool:
        """Whether the sequence needs no other mask: every token is allowed from here on."""
        is_long = self._num_tokens >= self._min_tokens
        return is_long and self._eos is None and self._matcher.is_free

    def write_mask(
        self, token_ids: list[int], masks: NDArray[np.int32], row: int
    ) -> FinishReason | None:
        """Accept tokens and write the mask of the next token, or return how the sequence ends.

        `masks` is `[num_rows, ceil(vocab_size / 32)]`; the row is all zero. Raises only errors of
        memory, which another sequence may have caused.
        """
        if self._finish_reason is not None:
            return self._finish_reason
        budget = self._budget_of()
        if budget.is_exhausted:
            self._finish_reason = self._failed(_BUDGET_ERROR)
            return self._finish_reason
        started_s = time.thread_time()
        try:
            found = self._next(token_ids, masks, row)
        # Whatever the library raises for one grammar must not affect the others.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = self._failed(f"the grammar failed: {error!r:.200}")
        took_s = time.thread_time() - started_s
        # Replayed tokens were charged before.
        cpu_s = self.cpu_s + took_s if self._was_queried else max(self.cpu_s, took_s)
        self.last_cpu_s, self.cpu_s = cpu_s - self.cpu_s, cpu_s
        self._was_queried = True
        budget.charge(self.last_cpu_s)
        if found is None and budget.is_exhausted:
            found = self._failed(_BUDGET_ERROR)
        if self.cpu_s > BASE_CPU_S + _TOKEN_CPU_S * self._num_tokens:
            found = self._failed(
                f"its masks took {self.cpu_s:.2f} s of CPU time for {self._num_tokens} tokens"
            )
        self._finish_reason = found
        return found

    def _next(
        self, token_ids: list[int], masks: NDArray[np.int32], row: int
    ) -> FinishReason | None:
        for token_id in token_ids:
            if not self._matcher.accept_token(token_id):
                return self._failed(REJECTED_TOKEN)
        self._num_tokens += len(token_ids)
        self._matcher.write_mask(masks, row)
        words = masks[row]
        if self._eos is not None:
            words &= ~self._eos
        if not words.any():
            if self._matcher.is_complete:
                return FinishReason.STOP
            return self._failed("the grammar allows no further token")
        if self._early is not None and self._num_tokens < self._min_tokens:
            later = words & ~self._early
            # Where the grammar allows nothing but an end, it takes precedence over min_tokens.
            if later.any():
                words[:] = later
        return None

    def _failed(self, error: str) -> FinishReason:
        self.error = error
        return FinishReason.ERROR


def _bits(token_ids: Iterable[int], size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)

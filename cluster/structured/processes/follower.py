"""One sequence on its way through a grammar, in the process that makes masks."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from cluster.structured.processes.memory_limit import is_out_of_memory
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from cluster.structured.processes.mask_messages import Ask, Follow
    from cluster.structured.processes.tenant_accounts import CpuAccount
    from cluster.structured.processes.xgrammar_library import Walk

__all__ = ["SPARE_S", "Follower", "tokens_s"]

SPARE_S = 0.5
"""CPU time that a sequence may take for its masks beyond what its tokens allow."""
_TOKEN_S = 0.01
"""CPU time that each token allows."""
_RETOLD_TOKEN_S = 0.0001
"""The same for a token that is told again, beyond what the sequence took before."""
_TENANT_TOOK_ALL = "the masks of its tenant took too long together"


def tokens_s(ask: Ask) -> float:
    """Return the CPU time that the tokens of a question allow for its answer.

    A whole text may be told again after another's fault. It takes 1 to 5 us a token, or, if the
    grammar is ambiguous, about what it took for the first time: most of that is not the masks.
    """
    if ask.follow is None:
        return _TOKEN_S * len(ask.token_ids)
    return _RETOLD_TOKEN_S * len(ask.token_ids) + ask.follow.spent_s


class Follower:
    """Follows one sequence, which it ends when anything is amiss."""

    def __init__(
        self, walk: Walk, follow: Follow, vocab_size: int, account_of: Callable[[], CpuAccount]
    ) -> None:
        """`account_of` returns the account that pays in the present step."""
        self._walk = walk
        self._account_of = account_of
        self._min_tokens = follow.min_tokens
        self._num_tokens = 0
        self._eos = _bits(follow.eos_token_ids, vocab_size) if follow.ignores_eos else None
        self._early = (
            _bits((*follow.eos_token_ids, *follow.stop_token_ids), vocab_size)
            if follow.min_tokens
            else None
        )
        self._was_asked = False
        self.spent_s = follow.spent_s
        """CPU time that it took so far."""
        self.last_s = 0.0
        """CPU time of the last mask."""
        self._end: FinishReason | None = None
        self.complaint = ""
        """Why it ended with an error, if it did."""

    def write_mask(
        self, token_ids: list[int], masks: NDArray[np.int32], row: int
    ) -> FinishReason | None:
        """Take tokens and write which may follow, or return how the sequence ends if none may.

        `masks` is `[num_rows, ceil(vocab_size / 32)]`; the row is all zero. Raises nothing but what
        says that there is no memory, for it may be another sequence that took it.
        """
        if self._end is not None:
            return self._end
        account = self._account_of()
        if account.is_empty:
            self._end = self._failed(_TENANT_TOOK_ALL)
            return self._end
        started_s = time.thread_time()
        try:
            found = self._next(token_ids, masks, row)
        # A grammar's failure must not be that of the others, whatever the library raises.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = self._failed(f"its grammar failed: {error!r:.200}")
        took_s = time.thread_time() - started_s
        # What is told again was paid for.
        spent_s = self.spent_s + took_s if self._was_asked else max(self.spent_s, took_s)
        self.last_s, self.spent_s = spent_s - self.spent_s, spent_s
        self._was_asked = True
        account.charge(self.last_s)
        if found is None and account.is_empty:
            found = self._failed(_TENANT_TOOK_ALL)
        if self.spent_s > SPARE_S + _TOKEN_S * self._num_tokens:
            found = self._failed(
                f"its grammar took {self.spent_s:.2f} s for {self._num_tokens} tokens"
            )
        self._end = found
        return found

    def _next(
        self, token_ids: list[int], masks: NDArray[np.int32], row: int
    ) -> FinishReason | None:
        for token_id in token_ids:
            if not self._walk.take(token_id):
                return self._failed("its grammar refused a token")
        self._num_tokens += len(token_ids)
        self._walk.write_mask(masks, row)
        words = masks[row]
        if self._eos is not None:
            words &= ~self._eos
        if not words.any():
            if self._walk.is_complete:
                return FinishReason.STOP
            return self._failed("its grammar allows no token any more")
        if self._early is not None and self._num_tokens < self._min_tokens:
            later = words & ~self._early
            # Where only an end may follow, the grammar decides.
            if later.any():
                words[:] = later
        return None

    def _failed(self, complaint: str) -> FinishReason:
        self.complaint = complaint
        return FinishReason.ERROR


def _bits(token_ids: Iterable[int], size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)

"""The tokens of one sequence in its grammar: its masks, and the masks behind drafts."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

import numpy as np

from cluster.structured.child_process import is_out_of_memory
from cluster.structured.messages import REJECTED_TOKEN
from cluster.structured.token_matchers import token_bits
from pagedray.request import FinishReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cluster.structured.messages import MaskQuery, MatcherStart
    from cluster.structured.token_matchers import TokenIndex, TokenMatcher

__all__ = ["BASE_CPU_S", "DraftMasks", "SequenceMatcher", "allowed_cpu_s"]

BASE_CPU_S = 0.5
"""CPU time that a sequence may take for its masks, in addition to that of its tokens."""
_TOKEN_CPU_S = 0.01
"""CPU time that each token allows."""
_REPLAYED_TOKEN_CPU_S = 0.0001
"""CPU time that a replayed token allows, in addition to the sequence's earlier time."""


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

    def __init__(self, matcher: TokenMatcher, start: MatcherStart, vocab_size: int) -> None:
        self.grammar_id = start.grammar_id
        self._matcher = matcher
        self._num_words = -(-vocab_size // 32)
        self._min_tokens = start.min_tokens
        self._num_tokens = 0
        eos_ids = [one for one in start.eos_token_ids if one < vocab_size]
        ids = [*eos_ids, *(one for one in start.stop_token_ids if one < vocab_size)]
        has_eos = start.ignores_eos and start.eos_token_ids
        self._eos = token_bits(eos_ids, self._num_words) if has_eos else None
        self._early = token_bits(ids, self._num_words) if start.min_tokens else None
        self._was_queried = False
        self.cpu_s = start.cpu_s
        """CPU time taken in total."""
        self.last_cpu_s = 0.0
        """CPU time of the last mask."""
        self._finish_reason: FinishReason | None = None
        self.error = ""
        """Why the sequence ended with an error; empty if it did not."""
        self._drafts: ReferenceType[DraftMasks] | None = None
        """The masks behind drafts that were requested last; their copy of the matcher is large."""

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
        if self.cpu_s > BASE_CPU_S + _TOKEN_CPU_S * self._num_tokens:
            found = self._failed(
                f"its masks took {self.cpu_s:.2f} s of CPU time for {self._num_tokens} tokens"
            )
        self._finish_reason = found
        return found

    def draft_masks(
        self, query: MaskQuery, mask: NDArray[np.int32], index: TokenIndex
    ) -> DraftMasks | None:
        """Return the maker of the masks behind drafts, or None if there is nothing to make.

        Neither the limits of CPU time nor the position of the sequence are affected. `mask` is that
        of the next token.
        """
        # A sequence has one copy of its matcher at a time, however long that takes.
        last = None if self._drafts is None else self._drafts()
        is_busy = last is not None and last.is_running
        if is_busy or not (query.draft_ids or self.forced_token(mask, index) is not None):
            return None
        copied = copy.copy(self)
        copied._matcher = self._matcher.copy()
        drafts = DraftMasks(query, copied, mask, index)
        self._drafts = ref(drafts)
        return drafts

    def next_mask(self, token_id: int) -> NDArray[np.int32] | None:
        """Accept a token and return the mask behind it; None if it is not allowed, or the last.

        Raises only errors of memory.
        """
        masks = np.zeros((1, self._num_words), dtype=np.int32)
        try:
            end = self._next([token_id], masks, 0)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None
        return masks[0] if end is None else None

    def forced_token(self, mask: NDArray[np.int32], index: TokenIndex) -> int | None:
        """Return the only token of a mask, or that of the only text; None if there are several."""
        places = np.flatnonzero(mask)
        word = int(mask.view(np.uint32)[places[0]])
        if len(places) == 1 and word.bit_count() == 1:
            return int(places[0]) * 32 + word.bit_length() - 1
        try:
            return self._matcher.forced_token(index)
        # As in `write_mask`; but a mask can do without it.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

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


class DraftMasks:
    """The masks behind the drafts of a sequence, made one by one on a copy of its matcher."""

    def __init__(
        self, query: MaskQuery, matcher: SequenceMatcher, mask: NDArray[np.int32], index: TokenIndex
    ) -> None:
        """`mask` is the mask of the next token."""
        self.masks: list[bytes] = []
        self.forced_ids: list[int] = []
        self.is_stopped = False
        """Whether no other mask is needed. Another thread may set this."""
        self.is_running = False
        """Whether masks are being made."""
        self._query = query
        self._matcher = matcher
        self._mask = mask
        self._index = index

    def make(self) -> None:
        """Make masks up to the first draft that is not allowed, and find forced tokens."""
        self.is_running = True
        try:
            self._make()
        finally:
            self.is_running = False

    def _make(self) -> None:
        for draft_id in self._query.draft_ids:
            if not self._advance(draft_id):
                return
            self.masks.append(self._mask.tobytes())
        forced_ids: list[int] = []
        while len(forced_ids) < self._query.num_forced:
            token_id = self._matcher.forced_token(self._mask, self._index)
            if token_id is None or not self._advance(token_id):
                break
            forced_ids.append(token_id)
        self.forced_ids = forced_ids

    def _advance(self, token_id: int) -> bool:
        """Make the mask behind a token, or return False if there is none."""
        mask = None if self.is_stopped else self._matcher.next_mask(token_id)
        if mask is not None:
            self._mask = mask
        return mask is not None

"""Compiled grammars as the scheduler knows them: matchers that make masks.

A matcher never raises, and ends its own sequence when anything is amiss.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedray.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from cluster.structured.xgrammar_library import Library, Walk
    from pagedray.request import Request

__all__ = ["CompiledGrammar"]

logger = logging.getLogger(__name__)

_SPARE_S = 0.5
"""CPU time that a sequence may take for its masks beyond what its tokens allow."""
_TOKEN_S = 0.01
"""CPU time that each token allows."""


class CompiledGrammar:
    """A structure, ready for any number of sequences."""

    def __init__(self, library: Library, compiled: Any, *, vocab_size: int) -> None:
        """`compiled` is the library's."""
        self._library = library
        self._compiled = compiled
        self._vocab_size = vocab_size

    @property
    def num_mask_bytes(self) -> int:
        """Bytes of a mask."""
        return -(-self._vocab_size // 32) * 4

    def matcher(self, request: Request) -> _Matcher:
        """Return a matcher for a continuation of the request, which is yet to begin."""
        return _Matcher(self._library, self._compiled, request, self._vocab_size)


class _Matcher:
    """Follows one sequence."""

    def __init__(self, library: Library, compiled: Any, request: Request, vocab_size: int) -> None:
        sampling = request.sampling
        self._library = library
        self._compiled = compiled
        # Made when first asked, since the library may fail.
        self._walk: Walk | None = None
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_taken = self._num_prompt_tokens
        self._min_tokens = sampling.min_tokens
        self._ignores_eos = sampling.ignore_eos
        self._eos = _bits(request.eos_token_ids, vocab_size)
        self._early = _bits((*request.eos_token_ids, *sampling.stop_token_ids), vocab_size)
        self._spent_s = 0.0
        self._end: FinishReason | None = None

    def mask(self, token_ids: Sequence[int]) -> bytes | FinishReason:
        """Return which tokens may follow, or how the sequence ends if none may."""
        if self._end is not None:
            return self._end
        started_s = time.thread_time()
        try:
            found = self._next(token_ids)
        # A grammar's failure must not be that of the replica, whatever the library raises.
        except Exception:
            logger.exception("A grammar failed; its sequence is ended.")
            found = FinishReason.ERROR
        self._spent_s += time.thread_time() - started_s
        num_tokens = len(token_ids) - self._num_prompt_tokens
        if self._spent_s > _SPARE_S + _TOKEN_S * num_tokens:
            logger.warning(
                "A grammar took %.2f s for %s tokens; its sequence is ended.",
                self._spent_s,
                num_tokens,
            )
            found = FinishReason.ERROR
        if isinstance(found, FinishReason):
            self._end = found
            self._walk = None
        return found

    def _next(self, token_ids: Sequence[int]) -> bytes | FinishReason:
        walk = self._walk or self._library.walk(self._compiled)
        self._walk = walk
        for token_id in token_ids[self._num_taken :]:
            if not walk.take(token_id):
                logger.warning("A grammar refused a token; its sequence is ended.")
                return FinishReason.ERROR
        self._num_taken = len(token_ids)
        words = walk.mask()
        if self._ignores_eos:
            words &= ~self._eos
        if not words.any():
            return FinishReason.STOP if walk.is_complete else FinishReason.ERROR
        if len(token_ids) - self._num_prompt_tokens < self._min_tokens:
            later = words & ~self._early
            # Where only an end may follow, the grammar decides.
            words = later if later.any() else words
        return bytes(words.tobytes())


def _bits(token_ids: Iterable[int], size: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-size // 32) * 32, dtype=np.uint8)
    bits[[token_id for token_id in token_ids if token_id < size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)

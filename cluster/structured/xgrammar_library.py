"""xgrammar, as far as it is used: compiled grammars, and masks of what may follow.

To import this module takes a few seconds, so it is imported where it is first needed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cluster.structured.vocabulary import Vocabulary

__all__ = ["Library", "Walk"]


class Library:
    """xgrammar with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._size = len(vocabulary.tokens)
        # Any: the library does not say what its constructors return.
        self._info: Any = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=self._size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )

    def compile(self, text: str) -> str:
        """Return a compiled grammar as JSON. Raises RuntimeError."""
        # Its threads begin here, since none would live through a fork.
        num_threads = min(8, len(os.sched_getaffinity(0)))
        compiler = xgrammar.GrammarCompiler(
            self._info, max_threads=num_threads, cache_enabled=False
        )
        return str(compiler.compile_grammar(text).serialize_json())

    def load(self, text: str) -> tuple[Any, int]:
        """Return a compiled grammar from its JSON, and its size in bytes."""
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        return compiled, int(compiled.memory_size_bytes)

    def walk(self, compiled: Any) -> Walk:
        """Return the start of a compiled grammar, or of its JSON."""
        if isinstance(compiled, str):
            compiled, _ = self.load(compiled)
        return Walk(xgrammar.GrammarMatcher(compiled), self._size)


class Walk:
    """A place in a grammar. Its methods raise RuntimeError when the library fails."""

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size
        self._words: NDArray[np.int32] = np.zeros((1, -(-size // 32)), dtype=np.int32)

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is one of the grammar."""
        return bool(self._matcher.is_completed())

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was taken."""
        return bool(self._matcher.is_terminated())

    def take(self, token_id: int) -> bool:
        """Go on by a token, or return False if it may not follow."""
        return bool(self._matcher.accept_token(token_id))

    def mask(self) -> NDArray[np.int32]:
        """Return which tokens may follow, a bit each; valid until the next call."""
        self._words.fill(0)
        self._matcher.fill_next_token_bitmask(self._words, 0)
        return self._words[0]  # type: ignore[no-any-return]  # the library has no types

    def allowed_ids(self) -> NDArray[np.intp]:
        """Return the ids of the tokens that may follow."""
        bits = np.unpackbits(self.mask().view(np.uint8), count=self._size, bitorder="little")
        return np.flatnonzero(bits)

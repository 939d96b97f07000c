"""xgrammar, as far as it is used: compiled grammars, and masks of what may follow.

For the process that compiles and its forks only. What is used of xgrammar computes in C++ on arrays
of any kind; torch and transformers, with which its import takes seconds and hundreds of megabytes,
are named in annotations and in what is not used.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.structured.processes.stub_modules import StandIn, in_place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cluster.structured.processes.vocabulary import Vocabulary

__all__ = ["Library", "Walk"]


# Any: the library has few types, and they say too little.
def _imported() -> Any:
    if "torch" not in sys.modules:
        try:
            # The library below it asks whether there is a torch, and does without.
            with in_place(torch=None):
                import tvm_ffi  # noqa: F401
            with in_place(torch=StandIn("torch"), transformers=StandIn("transformers")):
                import xgrammar
        except Exception:
            # A release that needs more of them; what was half imported must go.
            for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
                del sys.modules[name]
    import xgrammar

    return xgrammar


xgrammar = _imported()


class Library:
    """xgrammar with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        # Any: the library does not say what its constructors return.
        self._info: Any = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        # It keeps what it has found out of rules, for the forks as well. Its threads end with each
        # grammar: none is lost by a fork.
        self._compiler: Any = xgrammar.GrammarCompiler(
            self._info, max_threads=min(8, len(os.sched_getaffinity(0))), cache_enabled=True
        )

    @property
    def num_mask_words(self) -> int:
        """int32 words of a mask."""
        return -(-self.vocab_size // 32)

    def compile(self, text: str) -> str:
        """Return a compiled grammar as JSON. Raises RuntimeError."""
        return str(self._compiler.compile_grammar(text).serialize_json())

    def learn(self, text: str) -> None:
        """Compile a grammar only to compile the like of it faster. Raises RuntimeError."""
        self._compiler.compile_grammar(text)

    def load(self, text: str) -> tuple[Any, int]:
        """Return a compiled grammar from its JSON, and its size in bytes."""
        compiled = xgrammar.CompiledGrammar.deserialize_json(text, self._info)
        return compiled, int(compiled.memory_size_bytes)

    def walk(self, compiled: Any) -> Walk:
        """Return the start of a compiled grammar."""
        return Walk(xgrammar.GrammarMatcher(compiled))


class Walk:
    """A place in a grammar. Its methods raise RuntimeError when the library fails."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

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

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        """Write which tokens may follow into a row of zeros, a bit each."""
        self._matcher.fill_next_token_bitmask(masks, row)

    def allowed_ids(self, vocab_size: int) -> NDArray[np.intp]:
        """Return the ids of the tokens that may follow."""
        words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self.write_mask(words, 0)
        bits = np.unpackbits(words[0].view(np.uint8), count=vocab_size, bitorder="little")
        return np.flatnonzero(bits)

"""The part of xgrammar in use: compiled grammars and their token bitmasks.

Imported by the compiler process and its forks only. This part computes in C++ on any arrays, so
torch and transformers, whose import takes seconds and hundreds of megabytes, are replaced by stubs.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from cluster.structured.token_matchers import TextMatcher, TokenIndex

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cluster.structured.token_matchers import Vocabulary

__all__ = ["GrammarMatcher", "XGrammarLibrary"]

_STATE_BYTES = 4
"""Bytes of states in the JSON of a compiled grammar, by rule and character of its EBNF."""


class _StubModule(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *given, **named: None})


@contextmanager
def _stubbed(**modules: ModuleType | None) -> Iterator[None]:
    """Replace modules that are not imported yet; None makes their import fail.

    No other thread may import them at the same time.
    """
    # The type of sys.modules excludes None, which Python allows.
    sys.modules.update(modules)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)


# Any: the library's types are incomplete.
def _imported() -> Any:
    if "torch" not in sys.modules:
        try:
            # The library below it works without torch if its import fails.
            with _stubbed(torch=None):
                import tvm_ffi  # noqa: F401
            with _stubbed(torch=_StubModule("torch"), transformers=_StubModule("transformers")):
                import xgrammar
        except Exception:
            # This release needs more than the stubs: remove the partly imported modules.
            for name in [name for name in sys.modules if name.partition(".")[0] == "xgrammar"]:
                del sys.modules[name]
    import xgrammar

    return xgrammar


xgrammar = _imported()


class XGrammarLibrary:
    """xgrammar with one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = len(vocabulary.tokens)
        self.index = TokenIndex(vocabulary.tokens, vocabulary.special_token_ids)
        self.special_token_ids = vocabulary.special_token_ids
        """Control tokens by their texts."""
        # Any: the library's constructors are untyped.
        self._info: Any = xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=list(vocabulary.eos_token_ids),
        )
        # Its cache of rules is shared with forks. Its threads end with each grammar, so that a
        # fork loses none.
        self._compiler: Any = xgrammar.GrammarCompiler(
            self._info, max_threads=min(8, len(os.sched_getaffinity(0))), cache_enabled=True
        )

    @property
    def num_mask_words(self) -> int:
        """int32 words of a mask."""
        return -(-self.vocab_size // 32)

    def compile_grammar(self, text: str) -> tuple[Any, int]:
        """Return the compiled grammar of an EBNF, and its size in bytes. Raises RuntimeError."""
        return _with_size(self._compiler.compile_grammar(text))

    def compile_alone(self, text: str) -> tuple[Any, int]:
        """Run `compile_grammar` without the cache and in the calling thread only.

        The library ends the process if another thread of it runs out of memory.
        """
        compiler: Any = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        return _with_size(compiler.compile_grammar(text))

    def warm_up(self, text: str) -> None:
        """Compile an EBNF to fill the cache of rules. Raises RuntimeError."""
        self._compiler.compile_grammar(text)

    def json_of(self, compiled: Any) -> str:
        """Return a compiled grammar as JSON. Raises RuntimeError."""
        return str(compiled.serialize_json())

    def num_state_bytes(self, compiled: Any) -> int:
        """Return about how many bytes of its JSON are states, all of which it has for each rule."""
        text = str(compiled.grammar)
        return _STATE_BYTES * text.count("::=") * len(text)

    def load_grammar(self, text: str) -> tuple[Any, int]:
        """Return a compiled grammar from its JSON, and its size in bytes."""
        return _with_size(xgrammar.CompiledGrammar.deserialize_json(text, self._info))

    def matcher(self, compiled: Any) -> GrammarMatcher:
        """Return a matcher at the start of a compiled grammar."""
        return GrammarMatcher(xgrammar.GrammarMatcher(compiled))


def _with_size(compiled: Any) -> tuple[Any, int]:
    return compiled, int(compiled.memory_size_bytes)


class GrammarMatcher(TextMatcher):
    """A position in a grammar. Its methods raise RuntimeError if the library fails."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def has_ended(self) -> bool:
        """Whether an end-of-sequence token was accepted."""
        return bool(self._matcher.is_terminated())

    def accept_token(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def accept_text(self, text: str) -> bool:
        return bool(self._matcher.accept_string(text))

    def copy(self) -> Self:
        # Takes 2 us, and 30 us more for each 1000 tokens so far.
        return type(self)(self._matcher.fork())

    def forced_token(self, index: TokenIndex) -> int | None:
        text = self._matcher.find_jump_forward_string()
        return index.longest_prefix(text.encode()) if text else None

    def reset(self) -> None:
        self._matcher.reset()

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        self._matcher.fill_next_token_bitmask(masks, row)

    def allowed_ids(self, vocab_size: int) -> NDArray[np.intp]:
        """Return the ids of the allowed tokens."""
        words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self.write_mask(words, 0)
        bits = np.unpackbits(words[0].view(np.uint8), count=vocab_size, bitorder="little")
        return np.flatnonzero(bits)

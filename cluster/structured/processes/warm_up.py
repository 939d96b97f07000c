"""Warm-up of the compiler process while it is idle.

Strings of limited length are the largest part of the cost of compiling schemas: xgrammar checks
each position against the whole vocabulary. Positions are the same in all schemas, so they are
computed once, before a client needs them, in small steps of low priority.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import write_ebnf
from cluster.structured.grammar.schema_strings import limited_string
from pagedray.machine import lower_priority

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.structured.grammar.expressions import Expression
    from cluster.structured.xgrammar_library import XGrammarLibrary

__all__ = ["NICENESS", "WarmUp"]

_LENGTHS = (*((0, most) for most in range(2, 65, 2)), (0, 128), (32, 256))
"""Limits of strings with rules that all strings share."""
NICENESS = 10
"""Priority of compilations, below that of masks and ranks."""


class WarmUp:
    """Compiles strings of each length, a few lengths a step."""

    def __init__(self, library: XGrammarLibrary) -> None:
        self._library = library
        self._texts = self._grammars()
        self.is_done = False
        """Whether all lengths are compiled."""

    def run_step(self) -> None:
        """Compile the next lengths at low priority."""
        # In a thread, since a process cannot raise its priority again. It has ended when this
        # returns, so that a fork loses no thread.
        thread = threading.Thread(target=self._run_step)
        thread.start()
        thread.join()

    def _run_step(self) -> None:
        lower_priority(threading.get_native_id(), NICENESS)
        try:
            self._library.warm_up(next(self._texts))
        except (StopIteration, RuntimeError):
            # A failure is not reported, since no client requested it.
            self.is_done = True

    def _grammars(self) -> Iterator[str]:
        for minimum, maximum in _LENGTHS:
            rules: dict[str, Expression] = {}
            start = limited_string(rules, minimum, maximum)
            yield write_ebnf(rules, start)

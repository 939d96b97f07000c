"""What the process that compiles finds out while nobody asks it.

Most of what schemas cost is strings of a limited length: each place in them is compared with every
token. The places are the same in all schemas, so that they are gone through once, before a client
waits for it, a few at a time and behind whatever else wants to compute.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

from cluster.structured.grammar.expressions import write_ebnf
from cluster.structured.grammar.json_strings import limited_string

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.structured.processes.xgrammar_library import Library

__all__ = ["NICENESS", "IdleLearning"]

_MAX_LENGTH = 128
"""Up to here xgrammar has a state for each character, and shares them among all lengths."""
_STEP = 2
NICENESS = 10
"""How far what nobody waits for at each token stands behind what they wait for."""


class IdleLearning:
    """Goes through the strings of each length, a few lengths a step."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._texts = self._grammars()
        self.is_over = False
        """Whether there is nothing left to do."""

    def step(self) -> None:
        """Do a little, for as long as nothing else has to be done."""
        # A thread of its own, since who has let others pass may not come back to the front. It
        # has ended when this returns, so that a fork loses nothing.
        thread = threading.Thread(target=self._step)
        thread.start()
        thread.join()

    def _step(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self._library.learn(next(self._texts))
        except (StopIteration, RuntimeError):
            # Nobody asked for it, so that nobody is told either.
            self.is_over = True

    def _grammars(self) -> Iterator[str]:
        for length in range(_STEP, _MAX_LENGTH + 1, _STEP):
            name, rule = limited_string(0, length)
            yield write_ebnf({name.name: rule}, name)

"""A mask process without xgrammar, whose grammars do what their texts say.

`python -m tests.structured.fake_masks MASKS GRAMMARS MEMORY PRIORITY HANG`, with descriptors of two
sockets. Threads keep their priority if PRIORITY is not 0; HANG are seconds.
"""

from __future__ import annotations

import hashlib
import re
import resource
import socket
import subprocess
import sys
import time
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.structured import mask_process

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FakeMasks"]

_MAX_CPU_S = 60
"""Far more than tests take."""


class _Matcher:
    """Allows the token after the last one, after doing what its grammar says."""

    is_complete = False
    is_free = False

    def __init__(self, grammar: str) -> None:
        self._grammar = grammar
        self._last = 0
        self._kept: list[NDArray[np.uint8]] = []

    def accept_token(self, token_id: int) -> bool:
        self._last = token_id
        return True

    def copy(self) -> _Matcher:
        return copy(self)

    def forced_token(self, index: None) -> int | None:
        """Return a token that follows a few tokens, for a grammar that forces tokens."""
        is_forcing = self._grammar == "forces" and self._last in (4, 5, 6)
        return self._last + 1 if is_forcing else None

    def write_mask(self, masks: NDArray[np.int32], row: int) -> None:
        if self._last >= 3:
            self._act()
        masks[row, 0] = (
            3 << (self._last + 1) if self._grammar == "forces" else 1 << (self._last + 1)
        )

    def _act(self) -> None:
        match self._grammar.split(": "):
            case ["spins"]:
                # Without the GIL, as xgrammar does.
                while True:
                    hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
            case ["takes 50 ms"]:
                until_s = time.thread_time() + 0.05
                while time.thread_time() < until_s:
                    pass
            case ["waits for", path]:
                # Long enough to be costly, without the GIL; then for up to a minute.
                hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
                while not Path(path).exists():
                    time.sleep(0.001)
            case ["holds the lock"]:
                re.match("(a+)+$", "a" * 40 + "b")
            case ["eats"]:
                while True:
                    # Not written to, which would take time too.
                    self._kept.append(np.empty(4 * 2**20, np.uint8))


class _Library:
    vocab_size = 32
    num_mask_words = 1
    index = None

    # Any: the library decides what a grammar is.
    def load_grammar(self, text: str) -> tuple[Any, int]:
        kind, _, size = text.partition(" of ")
        kept = bytearray(int(size or 0))
        return (kind, kept), len(kept)

    def matcher(self, compiled: Any) -> _Matcher:
        return _Matcher(compiled[0])


class FakeMasks:
    """Starts such processes for a mask client."""

    def __init__(
        self, *, memory_bytes: int = 2**30, keeps_priority: bool = False, hang_s: float = 5.0
    ) -> None:
        """With `keeps_priority`, costly masks are made as fast as others.

        Otherwise, half a second of CPU time takes half a minute on a busy core.
        """
        self._options = (memory_bytes, int(keeps_priority), hang_s)
        self.processes: list[subprocess.Popen[bytes]] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        """Start a process and return its sockets."""
        (masks, their_masks), (grammars, their_grammars) = socket.socketpair(), socket.socketpair()
        with their_masks, their_grammars:
            theirs = (their_masks.fileno(), their_grammars.fileno())
            command = [sys.executable, "-m", __name__, *map(str, (*theirs, *self._options))]
            root = Path(__file__).parents[2]
            self.processes.append(subprocess.Popen(command, pass_fds=theirs, cwd=root))
        return masks, grammars


if __name__ == "__main__":
    # One that holds the GIL would not notice the end of tests that are killed.
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    if int(sys.argv[4]):
        mask_process._NICENESS = 0
    mask_process._HANG_S = float(sys.argv[5])
    masks, grammars = (socket.socket(fileno=int(one)) for one in sys.argv[1:3])
    library: Any = _Library()  # Any: a fake
    mask_process.serve_masks(masks, grammars, library, memory_bytes=int(sys.argv[3]))

"""The messages between the replica and the process that compiles structures."""

from __future__ import annotations

import msgspec

from cluster.structured.processes.vocabulary import Vocabulary

__all__ = [
    "COMPILE",
    "MAKE_MASKS",
    "CompileLimits",
    "Compiled",
    "CompilerStart",
    "Died",
    "Refused",
    "limits_for",
]

COMPILE = b"c"
"""Sent with the socket of a structure."""
MAKE_MASKS = b"m"
"""Sent with the sockets for masks and for grammars."""


class CompileLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What compiling a structure and making its masks may take."""

    compile_s: float = 10.0
    """CPU time, which does not depend on the load of the machine."""
    wait_s: float = 50.0
    """Wall time, on a busy machine."""
    memory_bytes: int = 512 * 2**20
    answer_bytes: int = 32 * 2**20
    """Size of a compiled grammar."""
    mask_memory_bytes: int = 2**30
    """For all grammars in use or cached, and all sequences that follow them."""
    mask_s: float = 0.1
    """CPU time to accept a token and make the next mask, in the trial after compiling."""


def limits_for(compile_s: float) -> CompileLimits:
    """Return the limits that go with a limit of CPU time to compile."""
    return CompileLimits(compile_s=compile_s, wait_s=5 * compile_s, mask_s=compile_s / 100)


class CompilerStart(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to the process."""

    vocabulary: Vocabulary
    limits: CompileLimits


class Compiled(msgspec.Struct, frozen=True, tag="compiled"):
    """A compiled grammar, as JSON of xgrammar."""

    text: bytes


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A structure that was rejected, with the message for its client."""

    message: str


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The fork that compiled was killed by a signal."""

    signal: int

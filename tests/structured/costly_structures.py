"""Structures that compile at once, and one that takes many seconds."""

from __future__ import annotations

from pagedray.structure import Structure

SMALL = Structure(kind="regex", text="a{3}")
OTHER = Structure(kind="regex", text="b")


def large(num_alternatives: int) -> Structure:
    """Return a grammar of a client, whose cost shows only in the compiler."""
    rules = (f'"{i}" [{chr(0x100 + i)}a-z]{{120}}' for i in range(num_alternatives))
    return Structure(kind="grammar", text="root ::= " + " | ".join(rules))


# It takes many seconds.
LARGE = large(400)

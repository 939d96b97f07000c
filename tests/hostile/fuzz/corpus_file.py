"""The corpus of a target: inputs that together reach all code that fuzzing has reached.

Each line of a file is a JSON string, whose characters are the bytes of one input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["read_corpus", "write_corpus"]

_FOLDER = Path(__file__).parent / "corpus"


def read_corpus(name: str) -> list[bytes]:
    """Return the inputs of a target; none if it has no file."""
    path = _FOLDER / f"{name}.jsonl"
    if not path.exists():
        return []
    return [json.loads(line).encode("latin-1") for line in path.read_text("ascii").splitlines()]


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    """Replace the inputs of a target."""
    lines = sorted(json.dumps(one.decode("latin-1")) + "\n" for one in set(inputs))
    (_FOLDER / f"{name}.jsonl").write_text("".join(lines), "ascii")

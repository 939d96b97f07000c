"""Regular expressions of clients."""

from __future__ import annotations

import re
import warnings

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure
from tests.hostile.fuzz.target import Target


def run(data: bytes) -> None:
    """Accept only what Python's `re` accepts too."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="regex", text=text))
    except InvalidRequestError:
        return
    with warnings.catch_warnings():
        # Of sets that may get another meaning in Python.
        warnings.simplefilter("ignore", FutureWarning)
        re.compile(text, re.ASCII)


TARGET = Target(
    run=run,
    seeds=(
        b"^[a-z0-9_]{1,16}(?:\\.[^\\s\\x00-\\u00ff]+)*$",
        b"(a|bc?)+?\\d{2,}|\\(x\\)|[\\]\\-b-]*",
        b"\\w+@\\w+\\.(com|org)\xc3\xa9",
    ),
    words=(
        b"(?:",
        b"[^",
        b"{1,}",
        b"{0,1000}",
        b"\\u",
        b"\\x",
        b"\\W",
        b"\\S",
        b"*?",
        b"|",
        b"\\b",
    ),
    max_bytes=512,
)

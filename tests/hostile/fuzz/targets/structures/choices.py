"""Lists of choices, as the HTTP frontend passes them on."""

from __future__ import annotations

from cluster.structured.grammar.grammar_text import grammar_text
from pagedray.errors import InvalidRequestError
from pagedray.structure import Structure
from tests.hostile.fuzz.target import Target


def run(data: bytes) -> None:
    """Return a grammar or an InvalidRequestError."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        grammar_text(Structure(kind="choice", text=text))
    except InvalidRequestError:
        return


TARGET = Target(
    run=run,
    seeds=(b'["yes","no"]', b'["\\u00e9", "\\ud83d\\ude00\\n", "yes"]'),
    words=(b"\\ud800", b"\\u0000", b'""', b"null", b"[["),
    max_bytes=512,
)

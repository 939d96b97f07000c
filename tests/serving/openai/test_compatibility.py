"""docs/compatibility.md says what the code does."""

from __future__ import annotations

from scripts.compatibility import DOCUMENT, document_with_tables


def test_tables_are_those_of_the_code() -> None:
    written = DOCUMENT.read_text()
    assert written == document_with_tables(written), "Run python -m scripts.compatibility."

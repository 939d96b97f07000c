"""The table of attacks in docs/security.md is that of the published results."""

from __future__ import annotations

import json

from scripts.hostile_table import DOCUMENT, RESULTS, document_with_table
from tests.hostile.catalog import ATTACKS


def test_document_has_the_published_results() -> None:
    document = DOCUMENT.read_text()
    results = json.loads(RESULTS.read_text())
    assert document_with_table(document, results) == document
    published = [name for name in ATTACKS if name in results]
    assert document.count("\n| ") > len(published) > 20

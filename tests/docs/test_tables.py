"""Every table of the documents is one table when it is rendered."""

from __future__ import annotations

from pathlib import Path

import pytest
from markdown_it import MarkdownIt

_ROOT = Path(__file__).parents[2]
_DOCUMENTS = sorted(
    str(path.relative_to(_ROOT)) for path in (_ROOT / "README.md", *_ROOT.glob("docs/**/*.md"))
)


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_rows_belong_to_a_table(document: str) -> None:
    blocks = MarkdownIt("commonmark").enable("table").parse((_ROOT / document).read_text())
    # Rows without a header are drawn as text.
    assert not [one.content for one in blocks if one.content.startswith("|")]

"""Links between the documents lead to files and headings, as GitHub names them.

MkDocs checks the pages of the site, but not the documents beside them. Pages that only the site has
are no targets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.system.server_process import ROOT

_DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/*/*.md")
    for path in ROOT.glob(pattern)
)  # fmt: skip
_LINK_IN_HEADING = re.compile(r"\[([^]]*)\]\([^)]*\)")
_NOT_IN_SLUG = re.compile(r"[^\w\- ]")


def _links(path: Path) -> Iterator[str]:
    """Yield the links and images of a document that lead to files of this repository."""
    for block in MarkdownIt().enable("table").parse(path.read_text()):
        for token in block.children or ():
            address = token.attrs.get("href", token.attrs.get("src"))
            if address is not None and "://" not in str(address):
                yield str(address)


def _anchors(path: Path) -> set[str]:
    tokens = MarkdownIt().parse(path.read_text())
    headings = [text.content for first, text in pairwise(tokens) if first.type == "heading_open"]
    titles = [_LINK_IN_HEADING.sub(r"\1", heading).lower() for heading in headings]
    return {_NOT_IN_SLUG.sub("", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", _DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(document: Path) -> None:
    for link in _links(document):
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link

"""The paths in documents on the code lead to one file or folder each, by the rule they state."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

import pytest

from tests.system.server_process import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DOCUMENTS = (
    *("architecture.md", "design/faults.md", "design/ranks.md", "design/scheduling.md"),
    *("design/serving.md", "where-to-make-a-change.md"),
)
_BLOCKS = [
    block
    for name in _DOCUMENTS
    for block in re.split(r"\n\n|\n(?=\|)", (ROOT / "docs" / name).read_text())
]
"""Paragraphs and rows of tables."""
_PATH = re.compile(r"`(\w[\w./-]*(?:/|\w\.(?:c|h|js|md|proto|py|svg|toml|tpl|yaml)))`")


def _paths(block: str) -> Iterator[str]:
    for path in _PATH.findall(block):
        yield path.rstrip("/")


def _with_parents(folder: PurePath) -> Iterator[PurePath]:
    yield folder
    yield from folder.parents[:-1]


def _found(path: str, folders: Iterable[PurePath]) -> set[PurePath]:
    return {folder / path for folder in folders if (ROOT / folder / path).exists()}


def _folder_of(path: PurePath) -> PurePath:
    return path if (ROOT / path).is_dir() else path.parent


@pytest.mark.parametrize(
    "block", [block for block in _BLOCKS if any(_paths(block))], ids=lambda block: block[:40]
)
def test_each_path_leads_to_one_file_or_folder(block: str) -> None:
    named = [PurePath(path) for path in _paths(block) if (ROOT / path).is_dir()]
    before: list[PurePath] = []
    for path in _paths(block):
        found = {PurePath(path)} if (ROOT / path).exists() else set()
        if not found:
            found = _found(path, {above for folder in before for above in _with_parents(folder)})
        if not found:
            found = _found(path, named)
        assert len(found) == 1, path
        before.append(_folder_of(found.pop()))

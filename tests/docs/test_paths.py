"""Documents on the code name classes and functions that exist, and few paths."""

from __future__ import annotations

import re

import pytest

from tests.system.server_process import ROOT

_DOCUMENTS = (
    *("architecture.md", "design/faults.md", "design/ranks.md", "design/scheduling.md"),
    *("design/serving.md", "where-to-make-a-change.md"),
)
_PATH = re.compile(r"`(\w[\w./-]*(?:/|\w\.(?:c|h|js|md|proto|py|svg|toml|tpl|yaml)))`")
_CLASS = re.compile(r"`([A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*)(?:[.(`])")
_PACKAGES = ("attention", "bench", "cluster", "pagedray", "workers")
_NOT_OURS = {"Host", "Origin"}
"""Headers of HTTP."""
MAX_PATHS = 110


def _text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def _defined_names() -> set[str]:
    sources = (path.read_text() for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {
        name
        for source in sources
        for names in re.findall(r"^\s*(?:class (\w+)|([A-Z]\w+)(?::| =))", source, re.MULTILINE)
        for name in names
    }


@pytest.mark.parametrize("document", _DOCUMENTS)
def test_paths_lead_to_files_and_folders(document: str) -> None:
    missing = [path for path in _PATH.findall(_text(document)) if not (ROOT / path).exists()]
    assert not missing


def test_named_classes_exist() -> None:
    named = {name for document in _DOCUMENTS for name in _CLASS.findall(_text(document))}
    assert named - _defined_names() - _NOT_OURS == set()


def test_documents_name_few_paths() -> None:
    assert sum(len(_PATH.findall(_text(document))) for document in _DOCUMENTS) <= MAX_PATHS

"""Code and documents have American spelling, except for `cancelled`, which Python and gRPC use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.server_process import ROOT

_BRITISH = re.compile(
    "(?:behavio|colo|favo|flavo|hono|labo|neighbo)ur"
    "|(?:cent|fib|met)re(?:s|d)?\\b"
    "|(?:initial|normal|optim|organ|parallel|recogn|serial|synchron|token)is(?:e|ing|ation)"
    "|(?:label|model|signal|travel)l(?:ed|ing)|catalogue|artefact|licence|towards|for ever\\b"
)
_SUFFIXES = (".c", ".css", ".h", ".html", ".js", ".md", ".proto", ".py", ".toml", ".yaml")
_FOLDERS = (
    "attention",
    "bench",
    "cluster",
    "deploy",
    "docs",
    "examples",
    "pagedray",
    "protos",
    "scripts",
    "tests",
    "workers",
)
_OTHERS = ("aria-labelledby",)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.suffix in _SUFFIXES and path.name != "test_spelling.py":
            yield path


@pytest.mark.parametrize("folder", _FOLDERS)
def test_spelling_is_american(folder: str) -> None:
    found = set()
    for path in _files(ROOT / folder):
        text = path.read_text(encoding="utf-8").lower()
        for word in _OTHERS:
            text = text.replace(word, "")
        found |= {(path.relative_to(ROOT).as_posix(), word) for word in _BRITISH.findall(text)}
    assert not found

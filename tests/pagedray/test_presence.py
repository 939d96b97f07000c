"""A path that cannot be looked up is an error, not absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedray.errors import CheckpointError
from pagedray.presence import has_file, has_folder, has_path

if TYPE_CHECKING:
    from pathlib import Path


def test_files_folders_and_other_things_are_told_apart(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    found = [[has(path) for has in (has_file, has_folder, has_path)] for path in (file, link)]
    assert found == [[True, False, True], [False, True, True]]


def test_what_is_missing_is_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "broken").symlink_to(tmp_path / "missing")
    for name in ("missing", "missing/a", "file/a", "loop", "broken"):
        path = tmp_path / name
        assert not has_file(path)
        assert not has_folder(path)
        assert not has_path(path)


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for has in (has_file, has_folder, has_path):
        with pytest.raises(CheckpointError, match="xxx cannot be read: File name too long"):
            has(path)

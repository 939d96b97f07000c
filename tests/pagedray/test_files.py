"""A path that cannot be looked up is an error, not absent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedray.errors import CheckpointError
from pagedray.files import has_file, has_folder, has_path

if TYPE_CHECKING:
    from pathlib import Path


def test_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch()
    link.symlink_to(tmp_path)
    assert [has(file) for has in (has_file, has_folder, has_path)] == [True, False, True]
    assert [has(link) for has in (has_folder, has_path)] == [True, True]


def test_a_folder_in_place_of_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"^{tmp_path} is not a file.$"):
        has_file(tmp_path)


def test_what_is_missing_is_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("missing", "missing/a", "file/a"):
        path = tmp_path / name
        assert not has_file(path)
        assert not has_folder(path)
        assert not has_path(path)


@pytest.mark.parametrize("target", ["missing", "../blobs/0f3e", "link"])
def test_a_link_to_nothing_is_an_error(target: str, tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to(target)
    for has in (has_file, has_folder, has_path):
        with pytest.raises(CheckpointError, match=f"link is a link to {target}, which does not"):
            has(path)


def test_a_name_that_is_too_long_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    for has in (has_file, has_folder, has_path):
        with pytest.raises(CheckpointError, match="xxx cannot be read: File name too long"):
            has(path)

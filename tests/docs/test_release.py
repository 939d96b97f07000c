"""The notes of a release come from the changelog, and a wheel without its data is rejected."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from pagedray.version import __version__
from scripts.release import check_contents, notes_of
from tests.system.server_process import ROOT


def test_changelog_has_the_version() -> None:
    notes = notes_of((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert notes.startswith("The first release.")


def test_notes_are_one_section() -> None:
    changelog = "# C\n\n## 2.0\n\nB\n\n### Added\n\n- c\n\n## 1.0\n\nA\n"
    assert notes_of(changelog, "2.0") == "B\n\n### Added\n\n- c\n"
    assert notes_of(changelog, "1.0") == "A\n"
    with pytest.raises(SystemExit, match=r"no section 3\.0"):
        notes_of(changelog, "3.0")


def test_a_wheel_without_protos_is_rejected(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pagedray/py.typed", "")
    with pytest.raises(SystemExit, match=r"pagedray/v1/pagedray\.proto"):
        check_contents(wheel)

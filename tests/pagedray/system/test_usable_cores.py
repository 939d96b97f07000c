"""The cores of a container are those of its limit."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pagedray.system.usable_cores import num_usable_cores

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


@pytest.mark.parametrize(
    ("limit", "num_cores"),
    [
        ("300000 100000\n", 3),
        ("150000 100000\n", 1),
        # Less than one core is still a thread.
        ("50000 100000\n", 1),
        ("6400000 100000\n", 8),
        ("max 100000\n", 8),
        ("", 8),
    ],
)
def test_a_limit_of_the_container_is_that_of_its_threads(
    tmp_path: Path, limit: str, num_cores: int
) -> None:
    (tmp_path / "cpu.max").write_text(limit)
    assert num_usable_cores(tmp_path) == num_cores


def test_without_a_group_all_allowed_cores_are_used(tmp_path: Path) -> None:
    assert num_usable_cores(tmp_path / "none") == 8

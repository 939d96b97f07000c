"""The memory of a container is that of its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pagedray.system.host_memory import available_host_bytes, host_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text(f"MemTotal: 9 kB\nMemAvailable:  {GIB // 1024} kB\nBuffers: 1 kB\n")
    return path


def test_available_memory_is_that_of_the_machine_without_a_limit(
    meminfo: Path, tmp_path: Path
) -> None:
    assert available_host_bytes(meminfo, tmp_path / "none") == GIB
    (tmp_path / "memory.max").write_text("max\n")
    assert available_host_bytes(meminfo, tmp_path) == GIB


@pytest.mark.parametrize(("limit", "left"), [(2**20, 2**20 - 5000 + 4096), (4000, 3096), (10, 0)])
def test_a_container_has_what_is_left_of_its_limit(
    meminfo: Path, tmp_path: Path, limit: int, left: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 1\nfile 9999\ninactive_file 4096\n")
    assert host_memory_bytes(tmp_path) == limit
    assert available_host_bytes(meminfo, tmp_path) == left

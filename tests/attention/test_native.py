"""Kernels in C are compiled on first use and cached; without a compiler there are none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from attention.kernels.cpu.native import load_kernels

SOURCE = "int answer(void) { return 42; }\n"

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "kernel.c"
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_library_is_compiled_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = load_kernels(source)
    assert library is not None
    assert library["answer"]() == 42
    # A compiler that is asked again would fail.
    monkeypatch.setattr("subprocess.run", None)
    assert load_kernels(source) is not None


@needs_compiler
def test_changed_source_is_compiled_again(source: Path) -> None:
    load_kernels(source)
    source.write_text(SOURCE.replace("42", "43"))
    library = load_kernels(source)
    assert library is not None
    assert library["answer"]() == 43


@needs_compiler
def test_source_that_does_not_compile_falls_back(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source.write_text("this is no C\n")
    assert load_kernels(source) is None
    assert "slower path" in caplog.text


def test_missing_compiler_falls_back(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert load_kernels(source) is None
    assert "No C compiler" in caplog.text


@needs_compiler
def test_cache_folder_that_others_can_write_is_not_trusted(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "pagedray" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert load_kernels(source) is None


def test_torch_and_the_kernels_share_one_openmp() -> None:
    torch.ones(2, 2).matmul(torch.ones(2, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split()[-1] for line in maps if "gomp" in line}
    assert len(libraries) <= 1

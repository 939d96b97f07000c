"""Kernels that were compiled in advance are loaded where the CPU has their instructions."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from attention.kernels.cpu import native
from attention.kernels.cpu.instruction_set import INSTRUCTION_SETS, InstructionSet
from attention.kernels.cpu.native import build_libraries, find_library, load_kernels

SOURCE = "int answer(void) { return 42; }\n"
MACROS = {
    "bmi": "bmi1",
    "gcc_have_sync_compare_and_swap_16": "cx16",
    "lahf_sahf": "lahf_lm",
    "lzcnt": "abm",
    "sse3": "pni",
    "avx512bf16": "avx512_bf16",
}
# Of CRC32 in SSE4.2, of FMA again, and of the widths of AVX-512 in GCC 14 and later.
OTHER_MACROS = ("crc32", "evex256", "evex512", "fp_fast_fma")

pytestmark = [
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64"),
]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with its libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "kernels" / "kernel.c"
    path.parent.mkdir()
    path.write_text(SOURCE)
    assert build_libraries(path.parent) == len(INSTRUCTION_SETS)
    return path


def _have(features: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"flags : {' '.join(sorted(features))}".encode()
    monkeypatch.setattr(native, "read_cpu_features", lambda: line)


def _answer(source: Path) -> int:
    library = load_kernels(source)
    assert library is not None
    found: int = library["answer"]()
    return found


def test_nothing_is_compiled_where_there_is_a_library(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_library(source) is None:
        pytest.skip("this CPU is older than all instruction sets")
    monkeypatch.setattr("subprocess.run", None)
    assert _answer(source) == 42
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("best", INSTRUCTION_SETS, ids=lambda one: one.name)
def test_the_library_with_the_most_instructions_of_the_cpu_is_chosen(
    source: Path, best: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have({"fpu", *best.features}, monkeypatch)
    library = find_library(source)
    assert library is not None
    assert library.name.startswith(f"kernel-{best.name}-")


def test_a_cpu_without_one_of_the_instructions_gets_no_library(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = INSTRUCTION_SETS[-1]
    for feature in smallest.features:
        _have(set(smallest.features - {feature}), monkeypatch)
        assert find_library(source) is None


@pytest.mark.parametrize("one", INSTRUCTION_SETS, ids=lambda one: one.name)
def test_an_instruction_set_names_all_that_the_compiler_may_use(one: InstructionSet) -> None:
    found = _macros(*one.options) - _macros("-march=x86-64")
    names = {MACROS.get(name, name) for name in found if not name.startswith(OTHER_MACROS)}
    assert names == one.features


def _macros(*options: str) -> set[str]:
    command = ["cc", *options, "-dM", "-E", "-x", "c", os.devnull]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[1].strip("_").lower() for line in text.splitlines()}


def test_a_library_of_another_source_is_not_loaded(source: Path) -> None:
    source.write_text(SOURCE.replace("42", "43"))
    assert _answer(source) == 43


def test_a_library_that_cannot_be_loaded_is_replaced(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for library in (source.parent / "prebuilt").iterdir():
        library.write_bytes(b"no library")
    assert _answer(source) == 42
    assert "Could not load" in caplog.text


def test_all_users_can_read_libraries_and_none_can_write_them(tmp_path: Path) -> None:
    (tmp_path / "kernel.c").write_text(SOURCE)
    mask = os.umask(0o077)
    try:
        build_libraries(tmp_path)
    finally:
        os.umask(mask)
    folder = tmp_path / "prebuilt"
    for path in (folder, *folder.iterdir()):
        assert path.stat().st_mode & 0o777 == 0o755

"""Kernels in C are compiled on first use and cached; without a compiler there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from attention.kernels.cpu.native import find_kernel, load_kernels, seal_file

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
    [warning] = caplog.messages
    assert "slower path" in warning
    assert "kernel.c:1:" in warning
    assert "error: " in warning


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo note; echo 'x.c: ERROR: no such instruction' >&2; exit 1", "no such instruction"),
        ("exit 3", "cc failed"),
        ("kill -SEGV $$", "cc was ended by signal 11"),
        ("exit 0", "No such file"),
    ],
)
def test_a_compiler_that_fails_is_reported_once(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    script: str,
    reason: str,
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert load_kernels(source) is None
    [warning] = caplog.messages
    assert reason in warning
    assert "\n" not in warning


def test_a_compiler_that_hangs_is_asked_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho >> {tmp_path}/calls\nexec sleep 1000\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr("attention.kernels.cpu.native._TIMEOUT_S", 0.5)
    assert load_kernels(source) is None
    assert (tmp_path / "calls").read_text() == "\n"
    [warning] = caplog.messages
    assert "slower path" in warning
    assert "cc did not end within 0.5 s" in warning


def test_missing_compiler_falls_back(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    assert load_kernels(source) is None
    assert "No C compiler" in caplog.text


@pytest.fixture
def planted(source: Path, tmp_path: Path) -> Path:
    """The cache with a library of another user in place of ours."""
    assert answer(source) == 42
    (cached,) = (tmp_path / "cache" / "pagedray" / "kernels").iterdir()
    evil = tmp_path / "evil.c"
    evil.write_text(SOURCE.replace("42", "666"))
    planted = tmp_path / "evil.so"
    subprocess.run(["cc", "-shared", "-o", planted, evil], check=True)
    # Anybody can seal a file: it only shows damage.
    seal_file(planted)
    planted.replace(cached)
    assert answer(source) == 666
    return cached


def answer(source: Path) -> int:
    library = load_kernels(source)
    assert library is not None
    found: int = library["answer"]()
    return found


@needs_compiler
@pytest.mark.parametrize("name", ["cache", "cache/pagedray", "cache/pagedray/kernels"])
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_cache_that_others_can_replace_is_not_used(
    source: Path, planted: Path, tmp_path: Path, name: str, mode: int
) -> None:
    (tmp_path / name).chmod(mode)
    assert answer(source) == 42


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@needs_compiler
@needs_root
@pytest.mark.parametrize("name", ["cache", "cache/pagedray", "cache/pagedray/kernels"])
def test_a_cache_of_another_user_is_not_used(
    source: Path, planted: Path, tmp_path: Path, name: str
) -> None:
    os.chown(tmp_path / name, 65534, -1)
    assert answer(source) == 42


@needs_compiler
@needs_root
def test_a_library_of_another_user_is_replaced(source: Path, planted: Path) -> None:
    os.chown(planted, 65534, -1)
    assert answer(source) == 42
    assert planted.stat().st_uid == os.geteuid()


@needs_compiler
def test_a_library_that_others_can_write_is_replaced(source: Path, planted: Path) -> None:
    planted.chmod(0o777)
    assert answer(source) == 42
    assert planted.stat().st_mode & 0o077 == 0


@needs_compiler
def test_a_link_to_a_library_is_replaced(source: Path, planted: Path, tmp_path: Path) -> None:
    elsewhere = planted.rename(tmp_path / "elsewhere.so")
    planted.symlink_to(elsewhere)
    assert answer(source) == 42
    assert not planted.is_symlink()


@needs_compiler
@pytest.mark.parametrize(
    "kept", [0, *(pytest.param(kept, marks=pytest.mark.slow) for kept in (10, 4096, 8192)), -1]
)
def test_a_damaged_library_is_compiled_again(source: Path, tmp_path: Path, kept: int) -> None:
    load_kernels(source)
    (cached,) = (tmp_path / "cache" / "pagedray" / "kernels").iterdir()
    content, mode = cached.read_bytes(), cached.stat().st_mode
    # In another file, since this process has mapped the library.
    cached.unlink()
    cached.write_bytes(content[:kept])
    cached.chmod(mode)
    # In another process, which a damaged library may end with a signal.
    program = (
        "from pathlib import Path; from attention.kernels.cpu.native import load_kernels; "
        f"print(load_kernels(Path({str(source)!r}))['answer']())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "42\n")
    assert "the cached file is damaged" in done.stderr
    assert cached.read_bytes() == content


@needs_compiler
def test_a_cache_behind_a_link_is_used(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link"))
    assert answer(source) == 42
    assert len(list((tmp_path / "real" / "pagedray" / "kernels").iterdir())) == 1


@pytest.fixture
def cache_disk(source: Path, tmp_path: Path) -> Iterator[Path]:
    """The cache, on a small disk."""
    disk = tmp_path / "cache"
    (disk / "pagedray" / "kernels").mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting a disk requires root")
    (disk / "pagedray" / "kernels").mkdir(parents=True, mode=0o700)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@needs_compiler
def test_a_full_cache_is_not_used(
    source: Path, cache_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (cache_disk / "large").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(2**12))
    assert answer(source) == 42
    assert "it cannot be cached" in caplog.text


@needs_compiler
@pytest.mark.parametrize("option", ["ro", "noexec"])
def test_a_cache_that_cannot_be_written_or_executed_is_not_used(
    source: Path, cache_disk: Path, caplog: pytest.LogCaptureFixture, option: str
) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", cache_disk], check=True)
    assert answer(source) == 42
    assert "it cannot be cached" in caplog.text


@needs_compiler
def test_a_user_without_a_home_has_no_cache(source: Path) -> None:
    """As in a container that runs as a number which is no user of its image."""
    as_stranger = ["unshare", "--user", "--map-user=12345", "env", "-u", "HOME"]
    if subprocess.run([*as_stranger, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    program = (
        "from pathlib import Path; from attention.kernels.cpu.native import load_kernels; "
        f"print(load_kernels(Path({str(source)!r}))['answer']())"
    )
    done = subprocess.run(
        [*as_stranger, "-u", "XDG_CACHE_HOME", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert "it cannot be cached: the user has no home directory" in done.stderr


@needs_compiler
def test_compiled_files_are_private_whatever_the_mask(source: Path, tmp_path: Path) -> None:
    mask = os.umask(0o002)
    try:
        load_kernels(source)
    finally:
        os.umask(mask)
    (cached,) = (tmp_path / "cache" / "pagedray" / "kernels").iterdir()
    assert cached.stat().st_mode & 0o077 == 0


@needs_compiler
def test_torch_and_the_kernels_share_one_openmp() -> None:
    # In a process of its own, without the libraries of other tests.
    program = """
from pathlib import Path

import torch

from attention.kernels.cpu.packed_gemm import PackedGemm

assert PackedGemm.make(torch.ones(64, 64), None) is not None
print(*{line.split()[-1] for line in Path("/proc/self/maps").open() if "gomp" in line})
"""
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert len(found.stdout.split()) == 1


@needs_compiler
def test_the_compiler_keeps_its_own_files_where_no_other_user_writes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_used = tmp_path / "folder_used"
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\nreadlink -f "$TMPDIR" > {folder_used}\nexec {shutil.which("cc")} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    assert answer(source) == 42
    assert folder_used.read_text().strip() == str(tmp_path / "cache" / "pagedray" / "kernels")


@needs_compiler
def test_a_kernel_is_found_in_the_first_library_that_has_it(source: Path) -> None:
    full = load_kernels(source)
    source.write_text("int other;\n")
    empty = load_kernels(source)
    assert empty is not None
    found = find_kernel("answer", [None, empty, full])
    assert found is not None
    assert found() == 42
    assert find_kernel("answer", [None, empty]) is None

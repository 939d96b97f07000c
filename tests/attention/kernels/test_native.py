"""Kernels in C are compiled on first use and cached; without a compiler there are none."""

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from attention.kernels.cpu import native
from attention.kernels.cpu.finite_copy import are_finite, copy_finite
from attention.kernels.cpu.greedy import Greedy
from attention.kernels.cpu.instruction_set import INSTRUCTION_SETS, InstructionSet
from attention.kernels.cpu.native import (
    build_libraries,
    find_kernel,
    find_library,
    load_kernels,
    seal_file,
)

SOURCE = "int answer(void) { return 42; }\n"
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
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
PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
]
# Of one block, of several and of a part of one in each row.
SHAPES = [(1,), (31,), (200_003,), (3, 70_001), (1001, 129), (0,), (5, 0)]
LARGEST = {
    torch.bfloat16: 3.3895e38,
    torch.float16: 65504.0,
    torch.float32: 3.4028e38,
}
INFINITY = float("inf")


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
    "kept", [*(pytest.param(kept, marks=pytest.mark.slow) for kept in (0, 10, 4096, 8192)), -1]
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


@pytest.fixture
def source_of_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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


def _answer(source_of_wheel: Path) -> int:
    library = load_kernels(source_of_wheel)
    assert library is not None
    found: int = library["answer"]()
    return found


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_nothing_is_compiled_where_there_is_a_library(
    source_of_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_library(source_of_wheel) is None:
        pytest.skip("this CPU is older than all instruction sets")
    monkeypatch.setattr("subprocess.run", None)
    assert _answer(source_of_wheel) == 42
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
@pytest.mark.parametrize("best", INSTRUCTION_SETS, ids=lambda one: one.name)
def test_the_library_with_the_most_instructions_of_the_cpu_is_chosen(
    source_of_wheel: Path, best: InstructionSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    _have({"fpu", *best.features}, monkeypatch)
    library = find_library(source_of_wheel)
    assert library is not None
    assert library.name.startswith(f"kernel-{best.name}-")


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_a_cpu_without_one_of_the_instructions_gets_no_library(
    source_of_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = INSTRUCTION_SETS[-1]
    for feature in smallest.features:
        _have(set(smallest.features - {feature}), monkeypatch)
        assert find_library(source_of_wheel) is None


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
@pytest.mark.parametrize("one", INSTRUCTION_SETS, ids=lambda one: one.name)
def test_an_instruction_set_names_all_that_the_compiler_may_use(one: InstructionSet) -> None:
    found = _macros(*one.options) - _macros("-march=x86-64")
    names = {MACROS.get(name, name) for name in found if not name.startswith(OTHER_MACROS)}
    assert names == one.features


def _macros(*options: str) -> set[str]:
    command = ["cc", *options, "-dM", "-E", "-x", "c", os.devnull]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[1].strip("_").lower() for line in text.splitlines()}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_a_library_of_another_source_is_not_loaded(source_of_wheel: Path) -> None:
    source_of_wheel.write_text(SOURCE.replace("42", "43"))
    assert _answer(source_of_wheel) == 43


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_a_library_that_cannot_be_loaded_is_replaced(
    source_of_wheel: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for library in (source_of_wheel.parent / "prebuilt").iterdir():
        library.write_bytes(b"no library")
    assert _answer(source_of_wheel) == 42
    assert "Could not load" in caplog.text


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
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


@needs_compiler
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("source_dtype", "target_dtype"), PAIRS, ids=str)
def test_values_are_copied_and_checked(
    source_dtype: torch.dtype, target_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    source = torch.randn(shape).to(source_dtype)
    flat = source.view(-1)
    if flat.numel() > 2:
        largest = LARGEST[source_dtype]
        flat[:3] = torch.tensor([largest, -largest, 1e-45], dtype=source_dtype)
    target = torch.full(shape, 7.0, dtype=target_dtype)
    assert copy_finite(target, source) is True
    assert torch.equal(target, source.to(target_dtype))
    for place in {0, flat.numel() // 2, flat.numel() - 1} if flat.numel() else ():
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            old = flat[place].clone()
            flat[place] = value
            assert copy_finite(target, source) is False
            assert torch.equal(target.isfinite(), source.isfinite())
            flat[place] = old


@needs_compiler
@pytest.mark.parametrize("dtype", LARGEST, ids=str)
def test_values_are_checked_where_they_are(dtype: torch.dtype) -> None:
    values = torch.randn(200_003).to(dtype)
    values[:3] = torch.tensor([LARGEST[dtype], -LARGEST[dtype], 1e-45], dtype=dtype)
    kept = values.clone()
    assert are_finite(values) is True
    assert torch.equal(values, kept)
    assert are_finite(values[:0]) is True
    assert are_finite(values[::2]) is None
    assert are_finite(values.double()) is None
    for place in (0, 100_001, 200_002):
        for value in (math.nan, -math.nan, math.inf, -math.inf):
            values[place] = value
            assert are_finite(values) is False
        values[place] = kept[place]


@needs_compiler
@pytest.mark.parametrize(("source_dtype", "target_dtype"), PAIRS, ids=str)
def test_only_the_rows_are_copied(source_dtype: torch.dtype, target_dtype: torch.dtype) -> None:
    whole = torch.full((40, 3000), math.nan, dtype=source_dtype)
    whole[:, 100:2500] = torch.randn(40, 2400).to(source_dtype)
    around = torch.full((80, 2600), 7.0, dtype=target_dtype)
    source, target = whole[:, 100:2500], around[::2, 50:2450]
    assert copy_finite(target, source) is True
    assert torch.equal(target, source.to(target_dtype))
    target.fill_(7.0)
    assert bool((around == 7.0).all())
    source[-1, -1] = math.inf
    assert copy_finite(target, source) is False


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.zeros(4, dtype=torch.float16), torch.zeros(4)),
        (torch.zeros(4, 4).t(), torch.zeros(4, 4)),
        (torch.zeros(4, 4), torch.zeros(4, 8)[:, ::2]),
        (torch.zeros(2, 6, 4)[:, ::3], torch.zeros(2, 2, 4)),
        (torch.zeros(4, device="meta"), torch.zeros(4)),
    ],
    ids=["dtypes", "transposed", "columns", "three dimensions", "device"],
)
def test_other_tensors_are_left_to_torch(target: torch.Tensor, source: torch.Tensor) -> None:
    assert copy_finite(target, source) is None


@pytest.fixture(scope="module")
def greedy() -> Greedy:
    """Return the kernel."""
    kernel = Greedy.make()
    if kernel is None:
        pytest.skip("needs a C compiler")
    return kernel


@pytest.mark.parametrize("size", [1, 2, 31, 511, 512, 513, 5000])
@pytest.mark.parametrize("scale", [0.01, 3.0, 1e38])
def test_the_first_of_the_highest_scores_is_found(greedy: Greedy, size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    # Few distinct numbers, so that many are equal, in rows that are wider than the vocabulary.
    numbers = torch.randint(-40, 40, (9, size + 3), generator=generator) / 40 * scale
    numbers[4] = -numbers[4].abs() - scale
    scores = numbers.bfloat16()[:, :size]
    rows = np.array([8, 0, 4, 4, 2], dtype=np.int64)
    found = greedy(scores, rows)
    assert found.dtype == torch.int64
    assert found.tolist() == scores.float().numpy()[rows].argmax(1).tolist()


@pytest.mark.parametrize("place", [0, 511, 512, 700, 1199])
def test_zeros_of_both_signs_are_equal_and_one_broken_score_breaks_its_row(
    greedy: Greedy, place: int
) -> None:
    scores = torch.full((6, 1200), -2.0, dtype=torch.bfloat16)
    scores[0, place:] = 0.0
    scores[0, place] = -0.0
    scores[1, place] = INFINITY
    scores[2, place] = float("nan")
    scores[3, place] = -float("nan")
    scores[4] = -INFINITY
    scores[5], scores[5, place] = -INFINITY, torch.finfo(torch.bfloat16).min
    assert greedy(scores, np.arange(6)).tolist() == [place, -1, -1, -1, -1, place]


def test_no_rows_and_no_tokens(greedy: Greedy) -> None:
    assert greedy(torch.zeros(3, 7).bfloat16(), np.empty(0, dtype=np.int64)).tolist() == []
    assert greedy(torch.zeros(2, 0).bfloat16(), np.arange(2)).tolist() == [-1, -1]

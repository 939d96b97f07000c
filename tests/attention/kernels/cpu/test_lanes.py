"""Vectors of the kernels in C, with the instructions of this machine and without AVX-512."""

from __future__ import annotations

import ctypes
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from attention.kernels.cpu import compiler, instruction_set
from attention.kernels.cpu.native import load_kernels

if TYPE_CHECKING:
    from pathlib import Path

HEADER = compiler.__file__.replace("compiler.py", "lanes.h")
SOURCE = f"""
#include "{HEADER}"
void rounded(const float *start, const float *x, const float *y, float *out) {{
    Floats sums = load_float(start);
    sums = add_product(sums, load_float(x), load_float(y));
    *(Floats *)out = sums - load_float(start);
}}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("without", ["", "-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-fma"])
def test_a_sum_is_rounded_before_more_is_added(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without and b" avx" not in instruction_set.read_cpu_features():
        pytest.skip("needs x86-64 with AVX")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compiler, "_FLAGS", (*compiler._FLAGS, *without.split()))
    source = tmp_path / "rounded.c"
    source.write_text(SOURCE)
    library = load_kernels(source)
    assert library is not None
    # The product is less than half of the distance between floats there, so that nothing is left of
    # it. A compiler that reassociates would see that the start cancels out.
    start, x, y = (torch.full((16,), value) for value in (1e8, 1.0, 3.0))
    out = torch.ones(16)
    library.rounded(*(ctypes.c_void_p(one.data_ptr()) for one in (start, x, y, out)))
    assert out.tolist() == [0.0] * 16

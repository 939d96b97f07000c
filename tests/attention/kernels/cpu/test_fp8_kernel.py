"""Fp8 numbers in the kernels in C, against what torch makes of every byte."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import attention.kernels.cpu
from attention.fp8 import from_fp8
from attention.kernels.cpu.paged_decode import DecodeBatch, PagedDecode
from attention.params import KV_CACHE_DTYPES
from tests.attention.rig import Rig, params_of

TYPES = pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
WIDEN = """
#include "fp8.h"
void widen(int is_e4m3, const uint8_t *from, float *floats, uint16_t *bfloats) {
    for (int i = 0; i < 256; i += LANES) {
        const Floats values = is_e4m3 ? load_e4m3(from + i) : load_e5m2(from + i);
        store_floats_float(floats + i, values);
        store_floats_bfloat(bfloats + i, values);
    }
}
"""


@TYPES
@pytest.mark.parametrize("flag", ["-march=native", "-march=x86-64-v3", "-march=x86-64"])
def test_every_byte_is_widened_as_torch_does(name: str, flag: str, tmp_path: Path) -> None:
    if platform.machine() != "x86_64" and flag != "-march=native":
        pytest.skip("needs an x86-64 compiler")
    dtype = KV_CACHE_DTYPES[name]
    assert dtype is not None
    source, library = tmp_path / "widen.c", tmp_path / "widen.so"
    source.write_text(WIDEN)
    headers = Path(str(attention.kernels.cpu.__file__)).parent
    options = ["-O2", flag, "-w", "-fPIC", "-shared", f"-I{headers}"]
    subprocess.run(["cc", *options, str(source), "-o", str(library)], check=True)
    numbers = torch.arange(256, dtype=torch.uint8)
    results = torch.zeros(256), torch.zeros(256, dtype=torch.bfloat16)
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (numbers, *results)]
    ctypes.CDLL(str(library))["widen"](name == "fp8_e4m3", *addresses)
    expected = numbers.view(dtype).float()
    for result in results:
        assert torch.equal(result.float().isnan(), expected.isnan())
        assert torch.equal(result.float().nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))


@TYPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_to_a_single_key_returns_its_value(name: str, dtype: torch.dtype) -> None:
    params = params_of(2, 1, 256, fp8=name)
    spec = Rig.spec_of(params, dtype=dtype, block_size=4, device="cpu")
    kernel = PagedDecode.make(params, spec)
    assert kernel is not None
    cache = torch.zeros(3, 1, 2, 4, 1, 256, dtype=torch.uint8)
    cache[2, 0, 1, 0, 0] = torch.arange(256)
    query, out = torch.zeros(1, 512, dtype=dtype), torch.zeros(1, 512, dtype=dtype)
    batch = DecodeBatch(0, np.array([[2]], dtype=np.int32), np.array([1], dtype=np.int32))
    kernel.run_decodes(batch, query, cache, 0, out, scales=(1.0, 0.5))
    expected = from_fp8(cache[2, 0, 1, 0, 0], spec.cache_dtype, torch.float32) * 0.5
    for head in out.float().view(2, 256):
        assert torch.equal(head.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))

"""The kernel of decodes with fewer instructions, against attention in float64.

With all instructions of this machine, tests of the backend run it.
"""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from attention.abstract import AttentionParams
from attention.kernels.cpu import instruction_set, paged_decode
from attention.kernels.cpu.paged_decode import PagedDecode
from tests.attention.kernels.cpu.variants import compile_with, variants
from tests.attention.rig import Rig, params_of

WITHOUT = ("-mno-avx512f", "-mno-avx512f -mno-avx2 -mno-fma")
LAYERS = [
    params_of(8, 4, 64),
    params_of(2, 2, 40),
    params_of(7, 1, 72, sliding_window=33),
    params_of(soft_cap=0.7, has_sinks=True),
    params_of(has_alibi=True),
    params_of(6, 3, 40, fp8="fp8_e5m2", sliding_window=9),
    params_of(fp8="fp8_e4m3"),
]


@pytest.fixture(scope="module", autouse=True, params=variants(*WITHOUT))
def _kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    if b" avx" not in instruction_set.read_cpu_features():
        pytest.skip("needs x86-64 with AVX")
    with pytest.MonkeyPatch.context() as patch:
        compile_with(patch, request.param)
        patch.setattr(paged_decode, "_library", cache(paged_decode._library.__wrapped__))
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", LAYERS, ids=repr)
def test_decodes_attend_as_defined(params: AttentionParams, dtype: torch.dtype) -> None:
    rig = Rig(params, dtype=dtype, block_size=16)
    if PagedDecode.make(params, rig.spec) is None:
        pytest.skip("needs a C compiler")
    a, b, c = (rig.sequence() for _ in range(3))
    rig.step(prefills=[(a, 97), (b, 1), (c, 30)])
    for _ in range(3):
        rig.step(decodes=[a, b, c], num_padding=1)

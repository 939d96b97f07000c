"""The kernels of recurrent layers in C, compiled with fewer instructions, against float64."""

import pytest
import torch

from attention.kernels.cpu import recurrent_steps
from attention.kernels.cpu.native import find_compiler
from attention.kernels.recurrent import causal_conv, selective_scan
from tests.attention.kernels.cpu.variants import compile_with, variants
from tests.attention.kernels.recurrent_case import ConvCase, DeltaCase, ScanCase, delta_rule

# Chunks, a lone last token, a decode and a row of padding.
STEP = [129, 1, 70, 1, 2], [8, 3, -1, 5, 0]


@pytest.fixture(params=variants("-mno-avx512f", "-mno-avx2"))
def _fewer_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_compiler() is None:
        pytest.skip("no C compiler")
    compile_with(monkeypatch, request.param)
    monkeypatch.setattr(recurrent_steps, "_kernel", recurrent_steps._kernel.__wrapped__)
    assert recurrent_steps._kernel("causal_conv", torch.float32) is not None


@pytest.mark.usefixtures("_fewer_instructions")
def test_kernels_with_fewer_instructions_are_exact() -> None:
    torch.manual_seed(0)
    conv = ConvCase.make(*STEP, num_channels=300)
    expected, states = conv.exact("silu")
    out = causal_conv(conv.x, conv.weight, None, conv.states, conv.segments, "silu")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(conv.states.double(), states)
    for case, rule in (
        (DeltaCase.make(*STEP, key_size=72, value_size=20), delta_rule),
        (ScanCase.make(*STEP, state_size=20), selective_scan),
    ):
        expected, states = case.exact()
        torch.testing.assert_close(case.run(rule).double(), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(case.states.double(), states, rtol=1e-4, atol=1e-4)

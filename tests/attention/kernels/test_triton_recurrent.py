"""Triton kernels of recurrent layers, against recurrences in float64."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from attention.kernels.triton.causal_conv import causal_conv
from tests.attention.kernels.recurrent_case import (
    ConvCase,
    has_untouched_surroundings,
)

# Decodes, prefills, both together, and lengths around those of chunks.
STEPS = [
    ([1, 1, 1], [4, -1, 7]),
    ([63, 64, 65], [0, 1, 2]),
    ([129, 1, 70, 1, 2], [8, 3, -1, 5, 0]),
]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(("query_lens", "rows"), STEPS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolutions_are_exact(
    query_lens: list[int], rows: list[int], width: int, activation: Literal["silu"] | None
) -> None:
    torch.manual_seed(0)
    case = ConvCase.make(query_lens, rows, width=width, has_bias=activation is None)
    expected, states = case.exact(activation)
    out = causal_conv(case.x, case.weight, case.bias, case.states, case.segments, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.states.double(), states)
    assert has_untouched_surroundings(case.states)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convolutions_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = ConvCase.make([5, 1], [0, 2], has_bias=True, num_channels=70, dtype=dtype)
    expected, states = case.exact("silu")
    out = causal_conv(case.x, case.weight, case.bias, case.states, case.segments, "silu")
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-5)
    assert torch.equal(case.states.double(), states)


def test_tokens_behind_the_segments_are_0() -> None:
    torch.manual_seed(0)
    case = ConvCase.make([70, 1, 68], [0, 1, 2])
    starts = case.segments.query_starts[:3]
    segments = replace(case.segments, query_starts=starts, rows=case.segments.rows[:2])
    out = causal_conv(case.x, case.weight, None, case.states, segments, None)
    assert out[70].any()
    assert not out[71:].any()

"""Triton kernels of recurrent layers, against recurrences in float64."""

from dataclasses import replace
from typing import Literal

import pytest
import torch

from attention.kernels import recurrent
from attention.kernels.arguments import DeltaGates, GatedNorm, Segments
from attention.kernels.triton.causal_conv import causal_conv
from attention.kernels.triton.delta_rule import delta_rule, gated_norm
from attention.kernels.triton.selective_scan import selective_scan
from tests.attention.kernels.kernel_device import DEVICE, or_slow
from tests.attention.kernels.recurrent_case import (
    CHAINED,
    SAVING,
    STEPS,
    ConvCase,
    DeltaCase,
    ScanCase,
    chains_equal_decodes,
    check_grouped_norm,
    saves_equal_cuts,
)

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize(("query_lens", "rows"), STEPS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolutions_are_exact(
    query_lens: list[int], rows: list[int], width: int, activation: Literal["silu"] | None
) -> None:
    case = ConvCase.make(query_lens, rows, width=width, has_bias=activation is None)
    case.check(causal_conv, activation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_convolutions_of_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    case = ConvCase.make([5, 1], [0, 2], has_bias=True, num_channels=70, dtype=dtype)
    case.check(causal_conv, "silu", rtol=TOLERANCES[dtype])


def test_tokens_behind_the_segments_are_0() -> None:
    case = ConvCase.make([70, 1, 68], [0, 1, 2])
    starts = case.segments.query_starts[:3]
    segments = replace(case.segments, query_starts=starts, rows=case.segments.rows[:2])
    out = causal_conv(case.x, case.weight, None, case.states, segments, None)
    assert out[70].any()
    assert not out[71:].any()


def plain_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    segments: Segments,
) -> torch.Tensor:
    return delta_rule(query, key, value, (log_decay, beta), None, states, segments)


@pytest.mark.parametrize(("query_lens", "rows"), STEPS)
@pytest.mark.parametrize("sizes", [(2, 2, 16, 32), (1, 3, 8, 20)])
def test_delta_rules_are_exact(
    query_lens: list[int], rows: list[int], sizes: tuple[int, int, int, int]
) -> None:
    DeltaCase.make(query_lens, rows, *sizes).check(plain_rule)


@pytest.mark.parametrize("query_lens", [[1, 1], [64, 66]])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_delta_rules_of_16_bits_are_near(query_lens: list[int], state_dtype: torch.dtype) -> None:
    case = DeltaCase.make(query_lens, [3, 1], dtype=torch.bfloat16, state_dtype=state_dtype)
    expected, states = case.exact()
    out = case.run(plain_rule).double()
    assert (out - expected).norm() < 1e-2 * expected.norm()
    assert (case.states.double() - states)[:4].norm() < 1e-2 * states[:4].norm()


@pytest.mark.parametrize("ends", [[64, 192, 193], [128, 140]])
def test_cuts_on_the_grid_give_equal_bits(ends: list[int]) -> None:
    case = DeltaCase.make(
        [ends[-1]], [2], num_key_heads=1, num_value_heads=1, state_dtype=torch.bfloat16
    )
    case.check_cuts(plain_rule, ends)


# A program norms the heads of few rows itself.
@pytest.mark.parametrize("query_lens", [[1, 1], [1] * 5, [70, 1]])
def test_gates_and_norm_are_those_of_the_reference(query_lens: list[int]) -> None:
    case = DeltaCase.make(query_lens, list(range(len(query_lens))), value_size=40)
    num_tokens, num_heads, size = case.value.shape
    # From softplus that underflows to softplus that is its argument.
    a = 12 * torch.randn(num_tokens, num_heads + 1, device=DEVICE)[:, :num_heads]
    b = 4 * torch.randn(num_tokens, num_heads, device=DEVICE)
    a_log, dt_bias = torch.randn(2, num_heads, device=DEVICE)
    z = torch.randn(num_tokens, num_heads + 1, size, device=DEVICE)[:, :num_heads]
    gates = DeltaGates(a=a, b=b, a_log=a_log - 2, dt_bias=dt_bias)
    norm = GatedNorm(z=z, weight=torch.randn(size, device=DEVICE), eps=0.01)
    plain = case.clone_states()
    expected = recurrent.gated_delta_rule(
        plain.query, plain.key, plain.value, gates, norm, plain.states, plain.segments
    )
    out = delta_rule(case.query, case.key, case.value, gates, norm, case.states, case.segments)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.states, plain.states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("query_lens", "rows"), STEPS)
@pytest.mark.parametrize("sizes", [(2, 4, 16, 32), (1, 3, 20, 8)])
def test_selective_scans_are_exact(
    query_lens: list[int], rows: list[int], sizes: tuple[int, int, int, int]
) -> None:
    ScanCase.make(query_lens, rows, *sizes).check(selective_scan)


def test_scans_that_are_cut_on_the_grid_give_equal_bits() -> None:
    case = ScanCase.make([193], [2], num_groups=1, num_heads=1, state_dtype=torch.bfloat16)
    case.check_cuts(selective_scan)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_saved_states_have_the_bits_of_segments_that_end_there(state_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    delta = DeltaCase.make(*SAVING, num_key_heads=1, num_value_heads=1, state_dtype=state_dtype)
    assert saves_equal_cuts(delta, lambda case: case.run(plain_rule))
    scan = ScanCase.make(*SAVING, num_groups=1, num_heads=1, state_dtype=state_dtype)
    assert saves_equal_cuts(scan, lambda case: case.run(selective_scan))


@pytest.mark.parametrize("width", [2, 4])
def test_saved_columns_have_the_bits_of_segments_that_end_there(width: int) -> None:
    torch.manual_seed(0)
    case = ConvCase.make(*SAVING, width=width)
    assert saves_equal_cuts(
        case,
        lambda one: causal_conv(one.x, one.weight, None, one.states, one.segments, "silu"),
    )


@pytest.mark.parametrize(
    "state_dtype", or_slow([torch.float32, torch.bfloat16], slow=[torch.float32])
)
def test_accepted_tokens_of_chains_advance_states_like_decodes(state_dtype: torch.dtype) -> None:
    delta = DeltaCase.make(*CHAINED, value_size=20, state_dtype=state_dtype)
    assert chains_equal_decodes(delta, lambda case: case.run(plain_rule))
    # Torch computes the gates of 32 heads as whole vectors, with the same bits in any step.
    scan = ScanCase.make(*CHAINED, num_heads=32, state_dtype=state_dtype)
    assert chains_equal_decodes(scan, lambda case: case.run(selective_scan))


@pytest.mark.parametrize("width", [2, 4])
def test_accepted_tokens_of_chains_advance_columns_like_decodes(width: int) -> None:
    case = ConvCase.make(*CHAINED, width=width, num_channels=320)
    assert chains_equal_decodes(
        case,
        lambda one: causal_conv(one.x, one.weight, None, one.states, one.segments, "silu"),
    )


@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize(("num_heads", "size"), [(3, 40), (1, 1100)])
def test_each_group_is_normed_with_its_own_weight(
    num_heads: int, size: int, gates_first: bool
) -> None:
    check_grouped_norm(gated_norm, num_heads, size, gates_first=gates_first)

"""Convolutions and delta rules in torch, against recurrences in float64 and transformers."""

from dataclasses import replace
from typing import Literal

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from attention.kernels.arguments import DeltaGates, GatedNorm
from attention.kernels.cpu import recurrent_steps
from attention.kernels.cpu.native import find_compiler
from attention.kernels.recurrent import causal_conv, gated_delta_rule, gated_norm, selective_scan
from tests.attention.kernels.kernel_device import DEVICE
from tests.attention.kernels.recurrent_case import (
    CHAINED,
    SAVING,
    STEPS,
    ConvCase,
    DeltaCase,
    ScanCase,
    chains_equal_decodes,
    check_grouped_norm,
    delta_rule,
    saves_equal_cuts,
    segments_of,
)


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def _both_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test twice: with kernels in C where they apply, and through torch."""
    if request.param == "torch":
        monkeypatch.setattr(recurrent_steps, "_kernel", lambda *_: None)
    elif find_compiler() is None:
        pytest.skip("no C compiler")
    else:
        assert recurrent_steps._kernel("causal_conv", torch.float32) is not None


ALL_STEPS = [*STEPS, ([1, 1, 1], [4, 0, 7]), ([200], [3])]


@pytest.mark.parametrize(("query_lens", "rows"), ALL_STEPS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("activation", ["silu", None])
def test_convolutions_are_exact(
    query_lens: list[int], rows: list[int], width: int, activation: Literal["silu"] | None
) -> None:
    case = ConvCase.make(query_lens, rows, width=width, has_bias=activation is None)
    case.check(causal_conv, activation)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_convolution_in_bfloat16_is_rounded_once(has_bias: bool) -> None:
    case = ConvCase.make([5, 1], [0, 2], has_bias=has_bias, dtype=torch.bfloat16)
    case.check(causal_conv, "silu", rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(("query_lens", "rows"), ALL_STEPS)
@pytest.mark.parametrize("sizes", [(2, 4, 16, 16), (1, 3, 8, 20), (2, 2, 24, 12), (1, 1, 72, 80)])
def test_delta_rules_are_exact(
    query_lens: list[int], rows: list[int], sizes: tuple[int, int, int, int]
) -> None:
    DeltaCase.make(query_lens, rows, *sizes).check(delta_rule)


def test_states_in_bfloat16_are_rounded_at_each_step() -> None:
    case = DeltaCase.make([1, 1], [3, 1], state_dtype=torch.bfloat16)
    expected, states = case.exact()
    out = case.run(delta_rule)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.states.double(), states, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 130])
def test_delta_rules_equal_those_of_transformers(num_tokens: int) -> None:
    case = DeltaCase.make([num_tokens], [2], key_size=8, value_size=24)
    rule = torch_recurrent_gated_delta_rule if num_tokens == 1 else torch_chunk_gated_delta_rule
    expected, state = rule(
        *(part.unsqueeze(0) for part in case.arguments),
        initial_state=case.states[2:3].mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    out = case.run(delta_rule)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.states[2], state[0].mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[64, 193], [128, 192, 193], [64, 128, 192, 193], [192, 200]])
def test_cuts_on_the_grid_give_equal_bits(ends: list[int], state_dtype: torch.dtype) -> None:
    DeltaCase.make([ends[-1]], [2], state_dtype=state_dtype).check_cuts(delta_rule, ends)


def test_a_segment_does_not_depend_on_other_segments() -> None:
    case = DeltaCase.make([65, 130, 7], [5, 0, 3])
    alone = case.clone_states().part(65, 195, 0)
    out = case.run(delta_rule)
    assert torch.equal(alone.run(delta_rule), out[65:195])
    assert torch.equal(alone.states[0], case.states[0])


@pytest.mark.parametrize("query_lens", [[1, 1], [70, 1]])
def test_gates_and_norm_equal_those_of_transformers(query_lens: list[int]) -> None:
    case = DeltaCase.make(query_lens, [0, 1])
    num_tokens, num_heads, size = case.value.shape
    a, b = 4 * torch.randn(2, num_tokens, num_heads, device=DEVICE)
    a_log, dt_bias = torch.randn(2, num_heads, device=DEVICE)
    z = torch.randn(num_tokens, num_heads, size, device=DEVICE)
    reference = Qwen3NextRMSNormGated(size, eps=0.01).to(DEVICE)
    reference.weight.data.normal_()
    log_decay = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    plain = replace(case.clone_states(), log_decay=log_decay, beta=b.sigmoid())
    out = plain.run(delta_rule)
    expected = reference(out.flatten(0, 1), z.flatten(0, 1)).view_as(out)
    gates = DeltaGates(a=a, b=b, a_log=a_log, dt_bias=dt_bias)
    norm = GatedNorm(z=z, weight=reference.weight.data, eps=0.01)
    normed = gated_delta_rule(
        case.query, case.key, case.value, gates, norm, case.states, case.segments
    )
    torch.testing.assert_close(normed, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.states, plain.states, rtol=1e-5, atol=1e-5)


def test_segments_without_tokens_or_a_row_have_no_span() -> None:
    assert segments_of([2, 0, 3, 1], [4, 1, -1, 0]).spans() == [(4, 0, 2), (0, 5, 6)]


@pytest.mark.parametrize(("query_lens", "rows"), ALL_STEPS)
@pytest.mark.parametrize("sizes", [(2, 4, 16, 32), (1, 3, 20, 8)])
def test_selective_scans_are_exact(
    query_lens: list[int], rows: list[int], sizes: tuple[int, int, int, int]
) -> None:
    ScanCase.make(query_lens, rows, *sizes).check(selective_scan)


def test_scans_that_are_cut_on_the_grid_give_equal_bits() -> None:
    ScanCase.make([193], [2], state_dtype=torch.bfloat16).check_cuts(selective_scan)


def test_scans_of_bfloat16_with_bfloat16_states_are_near() -> None:
    case = ScanCase.make([1, 70], [3, 1], dtype=torch.bfloat16, state_dtype=torch.bfloat16)
    expected, states = case.exact()
    out = case.run(selective_scan).double()
    assert (out - expected).norm() < 5e-3 * expected.norm()
    assert (case.states.double() - states)[:4].norm() < 5e-3 * states[:4].norm()


def test_strong_decays_are_as_precise_as_weak_decays() -> None:
    # Their sum over a chunk is in the hundreds.
    scan = ScanCase.make([192], [2])
    scan = replace(
        scan, gates=replace(scan.gates, a_log=torch.full((4,), 2.0), dt_bias=torch.ones(4))
    )
    delta = DeltaCase.make([192], [2])
    delta = replace(delta, log_decay=delta.log_decay - 8.0)
    for case, run in ((scan, selective_scan), (delta, delta_rule)):
        expected, states = case.exact()
        assert (case.run(run).double() - expected).norm() < 3e-7 * expected.norm()
        assert (case.states[2].double() - states[2]).norm() < 3e-7 * states[2].norm()


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_saved_states_have_the_bits_of_segments_that_end_there(state_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    delta = DeltaCase.make(*SAVING, state_dtype=state_dtype)
    assert saves_equal_cuts(delta, lambda case: case.run(delta_rule))
    # Torch computes the gates of 32 heads as whole vectors, with the same bits in any step.
    scan = ScanCase.make(*SAVING, num_heads=32, state_dtype=state_dtype)
    assert saves_equal_cuts(scan, lambda case: case.run(selective_scan))


@pytest.mark.parametrize("width", [2, 4])
def test_saved_columns_have_the_bits_of_segments_that_end_there(width: int) -> None:
    torch.manual_seed(0)
    case = ConvCase.make(*SAVING, width=width)
    assert saves_equal_cuts(
        case,
        lambda one: causal_conv(one.x, one.weight, None, one.states, one.segments, "silu"),
    )


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_accepted_tokens_of_chains_advance_states_like_decodes(state_dtype: torch.dtype) -> None:
    delta = DeltaCase.make(*CHAINED, value_size=20, state_dtype=state_dtype)
    assert chains_equal_decodes(delta, lambda case: case.run(delta_rule))
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

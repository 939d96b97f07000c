"""The choice of experts and their order, against torch."""

import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional

from attention.kernels.arguments import ExpertWeights, SigmoidScores
from attention.kernels.triton.experts import (
    MAX_ROW_PAIRS,
    ExpertTuning,
    choose_experts,
    default_expert_tuning,
    expert_sums,
    grouped_pairs,
)
from tests.attention.kernels.kernel_device import DEVICE, or_slow

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}
TUNING = ExpertTuning(tile_pairs=16, tile_columns=16, tile_depth=32, num_warps=2, num_stages=2)
SOME = [
    (1, torch.float32, TUNING),
    (1, torch.bfloat16, None),
    (7, torch.float16, None),
    (7, torch.bfloat16, TUNING),
    (60, torch.float32, None),
    (60, torch.float16, TUNING),
]
"""Each number of rows and each type, with each tuning."""
OTHERS = [
    case for case in itertools.product((1, 7, 60), TOLERANCES, (None, TUNING)) if case not in SOME
]


@pytest.mark.parametrize("is_renormalized", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(4, 1), (6, 6), (40, 8), (128, 8)])
def test_the_choice_is_that_of_torch(
    num_experts: int, num_chosen: int, is_renormalized: bool
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    logits = torch.randn(9, num_experts + 3, generator=generator).mul(4)[:, :num_experts]
    weights, experts = logits.double().softmax(1).topk(num_chosen)
    if is_renormalized:
        weights /= weights.sum(1, keepdim=True)
    ours, shares = choose_experts(logits.to(DEVICE), num_chosen, is_renormalized=is_renormalized)
    assert ours.tolist() == experts.tolist()
    torch.testing.assert_close(shares.cpu().double(), weights, rtol=1e-5, atol=1e-7)


def test_factors_multiply_the_weights_of_their_experts() -> None:
    logits, factors = torch.randn(5, 12), torch.rand(12)
    experts, weights = choose_experts(logits.to(DEVICE), 3, is_renormalized=True)
    _, found = choose_experts(
        logits.to(DEVICE), 3, is_renormalized=True, factors=factors.to(DEVICE)
    )
    torch.testing.assert_close(found, weights * factors.to(DEVICE)[experts.long()])


@pytest.mark.parametrize("is_renormalized", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_sigmoids_choose_with_a_bias_and_weigh_without(
    has_bias: bool, is_renormalized: bool
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 20, generator=generator).mul(4)
    bias = torch.randn(20, generator=generator) if has_bias else None
    scores = logits.double().sigmoid()
    experts = (scores if bias is None else scores + bias).topk(6).indices
    weights = scores.gather(1, experts)
    if is_renormalized:
        weights /= weights.sum(1, keepdim=True) + 0.01
    sigmoid = SigmoidScores(bias=None if bias is None else bias.to(DEVICE), scale=2.5, sum_eps=0.01)
    ours, shares = choose_experts(
        logits.to(DEVICE), 6, is_renormalized=is_renormalized, sigmoid=sigmoid
    )
    assert ours.tolist() == experts.tolist()
    torch.testing.assert_close(shares.cpu().double(), 2.5 * weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sigmoid", [None, SigmoidScores(bias=None)], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("has_gate", [False, True])
def test_every_row_chooses_the_stacked_experts(
    has_gate: bool, sigmoid: SigmoidScores | None
) -> None:
    logits = torch.randn(5, 13, device=DEVICE)
    others, other_weights = choose_experts(logits[:, :12], 3, is_renormalized=True, sigmoid=sigmoid)
    experts, weights = choose_experts(
        logits[:, : 12 + has_gate],
        3,
        is_renormalized=True,
        sigmoid=sigmoid,
        num_stacked=2,
        has_gate=has_gate,
    )
    assert torch.equal(experts[:, :3], others)
    assert torch.equal(weights[:, :3], other_weights)
    assert experts[:, 3:].tolist() == [[12, 13]] * 5
    gates = logits[:, 12:].sigmoid() if has_gate else torch.ones(5, 1, device=DEVICE)
    torch.testing.assert_close(weights[:, 3:], gates.expand(5, 2))


def test_of_equal_experts_the_first_are_chosen() -> None:
    experts, weights = choose_experts(torch.ones(2, 7, device=DEVICE), 3, is_renormalized=True)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), 1 / 3))


# What numpy, which the interpreter computes with, says of such rows.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("is_renormalized", [False, True])
def test_nan_is_in_all_weights_by_sigmoids(is_renormalized: bool) -> None:
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[1, 4] = torch.nan
    experts, weights = choose_experts(
        logits, 2, is_renormalized=is_renormalized, sigmoid=SigmoidScores(bias=None)
    )
    assert ((experts >= 0) & (experts < 5)).all()
    assert weights[1].isnan().all()
    torch.testing.assert_close(weights[[0, 2]].cpu(), torch.full((2, 2), 0.5))


# What numpy, which the interpreter computes with, says of such rows.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_experts_and_no_finite_weights(value: float) -> None:
    logits = torch.zeros(3, 5, device=DEVICE)
    logits[1] = value
    experts, weights = choose_experts(logits, 2, is_renormalized=True)
    assert ((experts >= 0) & (experts < 5)).all()
    assert weights[1].isnan().all()
    torch.testing.assert_close(weights[[0, 2]].cpu(), torch.full((2, 2), 0.5))


@pytest.mark.parametrize("num_rows", [0, 1, 50, 700])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pairs_are_in_the_stable_order_of_their_experts(num_rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    experts = torch.randint(0, 9, (num_rows, 7), generator=generator).to(dtype)
    pairs, starts = grouped_pairs(experts.to(DEVICE), first_expert=2, num_experts=5)
    flat = experts.flatten()
    order = [pair for expert in range(2, 7) for pair in (flat == expert).nonzero()[:, 0].tolist()]
    counts = [int((flat == expert).sum()) for expert in range(2, 7)]
    assert starts.tolist() == [sum(counts[:index]) for index in range(6)]
    assert pairs[: len(order)].tolist() == order


def few_rows_and_many(few: int, many: int) -> list[Any]:  # Any: parameters of pytest
    """Return few rows with tiles and many with the default, and the slow opposite."""
    slow = [(few, None), (many, TUNING)]
    return or_slow([(few, TUNING), (many, None), *slow], slow=slow)


def name_of(value: object) -> str:
    """Return the name of a parameter."""
    names = {None: "default", TUNING: "tiles"}
    return names[value] if value is None or isinstance(value, ExpertTuning) else str(value)


class ExpertCase:
    """Random weights of experts, and rows that chose some of them."""

    def __init__(
        self,
        num_rows: int,
        *,
        num_chosen: int = 3,
        num_experts: int = 5,
        hidden_size: int = 40,
        inner_size: int = 24,
        dtype: torch.dtype = torch.float32,
        has_gate: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(num_rows)
        self.has_gate = has_gate

        def randn(*shape: int) -> torch.Tensor:
            numbers: torch.Tensor = torch.randn(*shape, generator=generator)
            return numbers.div_(shape[-1] ** 0.5).to(dtype)

        self.x = randn(num_rows, hidden_size + 8).mul(hidden_size**0.5)[:, :hidden_size].to(DEVICE)
        num_columns = (2 if has_gate else 1) * inner_size
        self.gate_up = randn(num_experts, num_columns, hidden_size).to(DEVICE)
        self.down = randn(num_experts, hidden_size, inner_size).to(DEVICE)
        scores = torch.rand(num_rows, num_experts, generator=generator)
        weights, experts = scores.topk(num_chosen, dim=1)
        self.weights, self.experts = weights.to(DEVICE), experts.to(DEVICE)

    def sums(self, tuning: ExpertTuning | None = TUNING) -> torch.Tensor:
        return self.sums_of(slice(0, len(self.gate_up)), tuning)

    def sums_of(self, part: slice, tuning: ExpertTuning | None = TUNING) -> torch.Tensor:
        """Return what the rank that has some of the experts computes."""
        stored = ExpertWeights(
            first_expert=part.start,
            gate_up=self.gate_up[part],
            down=self.down[part],
            activation="silu" if self.has_gate else "relu2",
        )
        return expert_sums(self.x, self.experts, self.weights, stored, tuning=tuning)

    def expected(self) -> torch.Tensor:
        """Return the sums in float64, one pair at a time."""
        rows = []
        for x, experts, weights in zip(self.x, self.experts, self.weights, strict=True):
            total = torch.zeros_like(x, dtype=torch.float64)
            for expert, weight in zip(experts.tolist(), weights.double(), strict=True):
                columns = self.gate_up[expert].double() @ x.double()
                if self.has_gate:
                    gate, up = columns.chunk(2)
                    inner = functional.silu(gate) * up
                else:
                    inner = columns.relu().square()
                total += weight * (self.down[expert].double() @ inner)
            rows.append(total)
        return torch.stack(rows)

    def check(self, tuning: ExpertTuning | None = TUNING) -> None:
        tolerance = TOLERANCES[self.x.dtype]
        actual = self.sums(tuning).double()
        torch.testing.assert_close(actual, self.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "tuning"), or_slow([*SOME, *OTHERS], slow=OTHERS), ids=name_of
)
def test_sums_equal_those_of_float64(
    num_rows: int, dtype: torch.dtype, tuning: ExpertTuning | None
) -> None:
    ExpertCase(num_rows, dtype=dtype).check(tuning)


@pytest.mark.parametrize(
    ("num_rows", "dtype", "tuning"),
    [(2, torch.float32, None), (60, torch.bfloat16, TUNING)],
    ids=name_of,
)
def test_experts_without_gates_read_one_product(
    num_rows: int, dtype: torch.dtype, tuning: ExpertTuning | None
) -> None:
    ExpertCase(num_rows, dtype=dtype, has_gate=False).check(tuning)


@pytest.mark.parametrize(
    ("num_rows", "num_experts"),
    [(MAX_ROW_PAIRS, 4), (MAX_ROW_PAIRS + 1, 1), (MAX_ROW_PAIRS + 1, 33), (100, 4)],
)
def test_any_number_of_experts_is_summed(num_rows: int, num_experts: int) -> None:
    case = ExpertCase(
        num_rows, num_chosen=1, num_experts=num_experts, hidden_size=16, inner_size=16
    )
    case.check()


@pytest.mark.parametrize(("num_rows", "tuning"), few_rows_and_many(2, 50), ids=name_of)
def test_the_parts_of_two_ranks_add_up(num_rows: int, tuning: ExpertTuning | None) -> None:
    case = ExpertCase(num_rows)
    total = case.sums_of(slice(0, 2), tuning) + case.sums_of(slice(2, 5), tuning)
    torch.testing.assert_close(total.double(), case.expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_rows", "tuning"),
    or_slow([(2, None), (50, TUNING), (2, TUNING), (50, None)], slow=[(2, TUNING), (50, None)]),
    ids=name_of,
)
def test_rows_of_other_ranks_experts_are_zero(num_rows: int, tuning: ExpertTuning | None) -> None:
    case = ExpertCase(num_rows, num_chosen=1)
    case.experts.fill_(4)
    assert not case.sums_of(slice(1, 3), tuning).any()


@pytest.mark.parametrize(("num_rows", "tuning"), few_rows_and_many(2, 50), ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_sums_are_added_to_a_stream(
    dtype: torch.dtype, num_rows: int, tuning: ExpertTuning | None
) -> None:
    case = ExpertCase(num_rows, dtype=dtype)
    stream = torch.randn(num_rows, 40).to(DEVICE, dtype)
    expected = stream + case.sums(tuning)
    stored = ExpertWeights(first_expert=0, gate_up=case.gate_up, down=case.down)
    added = expert_sums(case.x, case.experts, case.weights, stored, tuning=tuning, stream=stream)
    assert added is stream
    assert torch.equal(stream, expected)


def test_all_rows_of_one_expert_are_summed() -> None:
    case = ExpertCase(70, num_chosen=1)
    case.experts.fill_(3)
    case.check()


@pytest.mark.parametrize("num_rows", or_slow([3, 90], slow=[3]))
def test_default_tuning_computes_the_same(num_rows: int) -> None:
    ExpertCase(num_rows, hidden_size=72, inner_size=80).check(None)


def test_tiles_hold_twice_what_an_expert_has_on_average() -> None:
    sizes = {
        num_pairs: default_expert_tuning(
            num_pairs=num_pairs, num_experts=8, dtype=torch.bfloat16
        ).tile_pairs
        for num_pairs in (8, 100, 200, 8000)
    }
    assert sizes == {8: 16, 100: 32, 200: 64, 8000: 128}


@pytest.mark.parametrize("num_rows", or_slow([3, 30, 60, 250], slow=[250]))
def test_every_default_tile_computes_the_same(num_rows: int) -> None:
    ExpertCase(num_rows, hidden_size=64, inner_size=40, dtype=torch.bfloat16).check(None)


@pytest.mark.parametrize(("num_rows", "tuning"), few_rows_and_many(5, 50), ids=name_of)
def test_a_value_that_is_not_finite_stays_in_its_row(
    num_rows: int, tuning: ExpertTuning | None
) -> None:
    case = ExpertCase(num_rows)
    before = case.sums(tuning)
    case.x[1, 5] = torch.nan
    after = case.sums(tuning)
    assert after[1].isnan().all()
    others = [row for row in range(num_rows) if row != 1]
    assert torch.equal(after[others], before[others])


def test_no_rows_are_no_sums() -> None:
    assert ExpertCase(0).sums().shape == (0, 40)

"""The choice of experts and their order, against torch."""

import pytest
import torch

from attention.kernels.triton.experts import choose_experts, grouped_pairs
from tests.attention.kernels.kernel_device import DEVICE


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


def test_of_equal_experts_the_first_are_chosen() -> None:
    experts, weights = choose_experts(torch.ones(2, 7, device=DEVICE), 3, is_renormalized=True)
    assert experts.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights.cpu(), torch.full((2, 3), 1 / 3))


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

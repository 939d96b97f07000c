"""Chooses the experts of rows, and sorts pairs of a row and an expert by expert.

The program of an expert counts the pairs of all experts before it, and then writes its own pairs.
For the numbers of experts that models have, this is faster than a sort.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import dependent_launch, wait_for_inputs
from attention.kernels.triton.tuning import next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import SigmoidScores

__all__ = ["choose_experts", "grouped_pairs"]

_FEW_ROWS = 8
_MIN_TILE = 128
_MAX_TILE = 4096


def grouped_pairs(
    experts: torch.Tensor, *, first_expert: int, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairs of some experts, sorted by expert, and the start of each expert's pairs.

    experts is `[num_rows, num_chosen]` of an integer type and contiguous; a pair is an index into
    its elements. The pairs are int32 `[num_pairs]`. The sort is stable, and pairs of experts
    outside `first_expert` to `first_expert + num_experts` are left out. The starts are int32
    `[num_experts + 1]`; the last one is the end of the last expert's pairs.
    """
    assert experts.is_contiguous()
    num_pairs = experts.numel()
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    tile = max(_MIN_TILE, min(next_power_of_two(max(1, num_pairs)), _MAX_TILE))
    _group[(num_experts + 1,)](
        experts,
        pairs,
        starts,
        num_pairs,
        first_expert,
        num_experts=num_experts,
        tile=tile,
        num_warps=max(1, min(tile // 128, 8)),
        **dependent_launch(experts.device),
    )
    return pairs, starts


@triton.jit(do_not_specialize=["num_pairs", "first_expert"])
def _group(
    experts: tl.tensor,
    pairs: tl.tensor,
    starts: tl.tensor,
    num_pairs: tl.tensor,
    first_expert: tl.tensor,
    num_experts: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write the start of an expert's pairs, and the pairs.

    Launched by `grouped_pairs`; grid `(num_experts + 1,)`. Pointers: experts and pairs
    `[num_pairs]`; starts `[num_experts + 1]`.
    """
    wait_for_inputs(is_dependent)
    expert = tl.program_id(0)
    indices = tl.arange(0, tile)
    before = tl.zeros((tile,), dtype=tl.int32)
    for first in range(0, num_pairs, tile):
        # Elements past the last pair are given an expert after all others.
        found = tl.load(
            experts + first + indices,
            mask=first + indices < num_pairs,
            other=first_expert + num_experts,
        ).to(tl.int32)
        found -= first_expert
        before += ((found >= 0) & (found < expert)).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(starts + expert, place)
    if expert < num_experts:
        for first in range(0, num_pairs, tile):
            found = tl.load(
                experts + first + indices,
                mask=first + indices < num_pairs,
                other=first_expert + num_experts,
            ).to(tl.int32)
            is_ours = found - first_expert == expert
            ranks = tl.cumsum(is_ours.to(tl.int32), axis=0)
            tl.store(pairs + place + ranks - 1, first + indices, mask=is_ours)
            place += tl.sum(is_ours.to(tl.int32), axis=0)


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    is_renormalized: bool,
    factors: torch.Tensor | None = None,
    sigmoid: SigmoidScores | None = None,
    num_stacked: int = 0,
    has_gate: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of the highest scores, int32, and their weights, float32.

    logits is `[num_rows, num_experts]`, with another column if `has_gate`; both results are
    `[num_rows, num_chosen + num_stacked]`, the highest first and equal values by index. Scores are
    the softmax of a row, or with `sigmoid` its sigmoids. The weights of a row are its scores,
    divided by their sum if `is_renormalized`, and times the experts' `factors`, float32
    `[num_experts]`, if given. Every row chooses the stacked experts behind all others, each with a
    weight of 1, or with the sigmoid of the other column.
    """
    num_rows, num_experts = len(logits), logits.shape[1] - has_gate
    assert logits.stride(1) == 1
    assert 0 < num_chosen <= num_experts
    assert factors is None or sigmoid is None
    shape = num_rows, num_chosen + num_stacked
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    numbers = factors if sigmoid is None else sigmoid.bias
    if num_rows:
        tile = next_power_of_two(num_experts)
        _choose[(num_rows,)](
            logits,
            logits if numbers is None else numbers,
            experts,
            weights,
            logits.stride(0),
            has_numbers=numbers is not None,
            is_sigmoid=sigmoid is not None,
            scale=1.0 if sigmoid is None else sigmoid.scale,
            sum_eps=0.0 if sigmoid is None else sigmoid.sum_eps,
            num_experts=num_experts,
            num_chosen=num_chosen,
            num_stacked=num_stacked,
            has_gate=has_gate,
            is_renormalized=is_renormalized,
            tile=tile,
            chosen_tile=next_power_of_two(num_chosen + num_stacked),
            # One warp finds a maximum without shared memory; more warps read more rows faster.
            num_warps=1 if num_rows <= _FEW_ROWS else max(1, min(tile // 128, 4)),
            **dependent_launch(logits.device),
        )
    return experts, weights


@triton.jit
def _choose(
    logits: tl.tensor,
    numbers: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    logits_stride: tl.tensor,
    has_numbers: tl.constexpr,
    is_sigmoid: tl.constexpr,
    scale: tl.constexpr,
    sum_eps: tl.constexpr,
    num_experts: tl.constexpr,
    num_chosen: tl.constexpr,
    num_stacked: tl.constexpr,
    has_gate: tl.constexpr,
    is_renormalized: tl.constexpr,
    is_dependent: tl.constexpr,
    tile: tl.constexpr,
    chosen_tile: tl.constexpr,
) -> None:
    """Write the experts of a row and their weights.

    Launched by `choose_experts`; grid `(num_rows,)`. Pointers: logits `[num_rows, num_experts]`, or
    more columns; numbers `[num_experts]` float32, factors or biases; experts and weights
    `[num_rows, num_chosen + num_stacked]`.
    """
    wait_for_inputs(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    indices = tl.arange(0, tile)
    is_expert = indices < num_experts
    logits += row * logits_stride
    left = tl.load(logits + indices, mask=is_expert, other=-float("inf")).to(tl.float32)
    highest = tl.max(left, axis=0)
    if is_sigmoid:
        scores = 1.0 / (1.0 + tl.exp(-left))
        # NaN of any score is in all weights.
        total = tl.sum(scores, axis=0) * 0.0 + 1.0
        left = scores
        if has_numbers:
            left += tl.load(numbers + indices, mask=is_expert, other=0.0)
        left = tl.where(is_expert, left, -float("inf"))
    else:
        scores = tl.exp(left - highest)
        total = tl.sum(scores, axis=0)
    places = tl.arange(0, chosen_tile)
    chosen = tl.zeros((chosen_tile,), dtype=tl.int32)
    shares = tl.zeros((chosen_tile,), dtype=tl.float32)
    for place in range(num_chosen):
        best = tl.max(left, axis=0)
        # If no logit equals the maximum, the row has NaN, which any expert propagates.
        index = tl.min(tl.where(left == best, indices, num_experts - 1), axis=0)
        chosen = tl.where(places == place, index, chosen)
        share = tl.exp(best - highest)
        if is_sigmoid:
            share = tl.sum(tl.where(indices == index, scores, 0.0), axis=0)
        shares = tl.where(places == place, share, shares)
        left = tl.where(indices == index, -float("inf"), left)
    if is_renormalized:
        if is_sigmoid:
            total *= tl.sum(shares, axis=0) + sum_eps
        else:
            total = tl.sum(shares, axis=0)
    shares /= total
    if is_sigmoid:
        shares *= scale
    elif has_numbers:
        shares *= tl.load(numbers + chosen)
    if num_stacked > 0:
        share = 1.0
        if has_gate:
            share = 1.0 / (1.0 + tl.exp(-tl.load(logits + num_experts).to(tl.float32)))
        is_stacked = places >= num_chosen
        chosen = tl.where(is_stacked, num_experts + places - num_chosen, chosen)
        shares = tl.where(is_stacked, share, shares)
    is_chosen = places < num_chosen + num_stacked
    first = row * (num_chosen + num_stacked)
    tl.store(experts + first + places, chosen, mask=is_chosen)
    tl.store(weights + first + places, shares, mask=is_chosen)

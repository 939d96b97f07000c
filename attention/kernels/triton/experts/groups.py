"""Sorts pairs of a row and an expert by expert, in one kernel.

The program of an expert counts the pairs of all experts before it, and then writes its own pairs.
For the numbers of experts that models have, this is faster than a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from attention.kernels.triton.kernel_launcher import dependent_launch, wait_for_inputs
from attention.kernels.triton.tuning import next_power_of_two

__all__ = ["grouped_pairs"]

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

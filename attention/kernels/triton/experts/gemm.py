"""The MLPs of the experts of each row, with or without a gate, and their weighted sum.

A grouped GEMM: a pair is a row and one of its experts. Pairs are sorted by expert, and each tile of
a product has pairs of a single expert; for a few pairs, `rows.py` is used instead. The grid depends
on shapes only and the host reads nothing, so CUDA graphs can capture it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton

from attention.kernels.triton.experts.groups import grouped_pairs
from attention.kernels.triton.experts.rows import row_expert_sums
from attention.kernels.triton.experts.tiles import sum_parts, tile_down, tile_gate_up
from attention.kernels.triton.experts.tuning import (
    MXFP4_HALF,
    ExpertTuning,
    default_expert_tuning,
    mxfp4_row_bytes,
)
from attention.kernels.triton.kernel_launcher import dependent_launch
from attention.kernels.triton.tuning import dot_type, next_power_of_two

if TYPE_CHECKING:
    from attention.kernels.arguments import ExpertWeights

__all__ = ["MAX_MXFP4_ROW_PAIRS", "MAX_ROW_PAIRS", "expert_sums"]

MAX_ROW_PAIRS = 72
"""Maximum number of pairs for which `rows.py` is used: 8 rows with 8 experts and a stacked one."""
MAX_MXFP4_ROW_PAIRS = 32
"""The same in mxfp4."""
_SUM_TILE = 1024


def expert_sums(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    stored: ExpertWeights,
    *,
    tuning: ExpertTuning | None = None,
    stream: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each row's experts, `[num_rows, hidden_size]`.

    With a stream of this shape, the sums are added to it, in place, and it is returned.

    x is `[num_rows, hidden_size]`; experts integers and weights float32, `[num_rows, num_chosen]`.
    In mxfp4 on GPUs, x is in bfloat16.
    """
    num_rows, hidden_size = x.shape
    num_chosen = experts.shape[1]
    num_experts, inner_size, is_mxfp4 = stored.num_experts, stored.inner_size, stored.is_mxfp4
    assert is_mxfp4 == (stored.down_scales is not None)
    gate_up_row, down_row = hidden_size, inner_size
    if is_mxfp4:
        assert x.dtype == torch.bfloat16 or not x.is_cuda
        gate_up_row, down_row = mxfp4_row_bytes(hidden_size), mxfp4_row_bytes(inner_size)
    assert stored.gate_up.shape == (num_experts, stored.num_columns, gate_up_row)
    assert stored.down.shape == (num_experts, hidden_size, down_row)
    assert x.stride(1) == 1
    assert stored.gate_up.is_contiguous()
    assert stored.down.is_contiguous()
    assert stored.gate_up_bias is None or stored.gate_up_bias.is_contiguous()
    assert stored.down_bias is None or stored.down_bias.is_contiguous()
    num_pairs = num_rows * num_chosen
    out = x.new_empty((num_rows, hidden_size)) if stream is None else stream
    assert out.is_contiguous()
    if not num_pairs:
        return out
    experts, weights = experts.contiguous(), weights.contiguous()
    if tuning is None and num_pairs <= (MAX_MXFP4_ROW_PAIRS if is_mxfp4 else MAX_ROW_PAIRS):
        row_expert_sums(x, experts, weights, stored, out, adds=stream is not None)
        return out
    tuning = tuning or default_expert_tuning(
        num_pairs=num_pairs, num_experts=num_experts, dtype=x.dtype, is_mxfp4=is_mxfp4
    )
    pairs, starts = grouped_pairs(
        experts, first_expert=stored.first_expert, num_experts=num_experts
    )
    # Only the last tile of an expert is not full.
    num_tiles = num_pairs // tuning.tile_pairs + min(num_pairs, num_experts)
    inner = x.new_empty((num_pairs, inner_size))
    parts = x.new_empty((num_pairs, hidden_size))
    where = (pairs, starts, num_pairs)
    tiling = {
        "hidden_size": hidden_size,
        "inner_size": inner_size,
        "num_experts": num_experts,
        "expert_tile": next_power_of_two(num_experts),
        "operand_type": dot_type(x),
        "is_mxfp4": is_mxfp4,
        # The interpreter has no inline assembly.
        "unpacks": x.is_cuda,
        "half": MXFP4_HALF,
        "tile_pairs": tuning.tile_pairs,
        "tile_columns": tuning.tile_columns,
        "tile_depth": tuning.tile_depth,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
        **dependent_launch(x.device),
    }
    alpha, limit = stored.clamp or (0.0, 0.0)
    tile_gate_up[(triton.cdiv(inner_size, tuning.tile_columns), num_tiles)](
        x,
        stored.gate_up,
        stored.gate_up if stored.gate_up_scales is None else stored.gate_up_scales,
        x if stored.gate_up_bias is None else stored.gate_up_bias,
        inner,
        *where,
        x.stride(0),
        num_chosen,
        row_size=gate_up_row,
        has_bias=stored.gate_up_bias is not None,
        activation=stored.gate,
        alpha=alpha,
        limit=limit,
        num_columns=stored.num_columns,
        **tiling,
    )
    tile_down[(triton.cdiv(hidden_size, tuning.tile_columns), num_tiles)](
        inner,
        stored.down,
        stored.down if stored.down_scales is None else stored.down_scales,
        inner if stored.down_bias is None else stored.down_bias,
        weights,
        parts,
        *where,
        row_size=down_row,
        has_bias=stored.down_bias is not None,
        **tiling,
    )
    sum_parts[(num_rows, triton.cdiv(hidden_size, _SUM_TILE))](
        parts,
        experts,
        out,
        stored.first_expert,
        hidden_size,
        num_experts=num_experts,
        num_chosen=num_chosen,
        adds=stream is not None,
        tile=_SUM_TILE,
        **dependent_launch(x.device),
    )
    return out

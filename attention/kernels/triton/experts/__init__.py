"""Kernels for layers with experts: routing, grouping rows by expert, and the matrix products."""

from attention.kernels.triton.experts.gemm import MAX_MXFP4_ROW_PAIRS, MAX_ROW_PAIRS, expert_sums
from attention.kernels.triton.experts.groups import choose_experts, grouped_pairs
from attention.kernels.triton.experts.tuning import (
    ExpertTuning,
    default_expert_tuning,
    mxfp4_row_bytes,
    packed_mxfp4,
)

__all__ = [
    "MAX_MXFP4_ROW_PAIRS",
    "MAX_ROW_PAIRS",
    "ExpertTuning",
    "choose_experts",
    "default_expert_tuning",
    "expert_sums",
    "grouped_pairs",
    "mxfp4_row_bytes",
    "packed_mxfp4",
]

"""Which of FlashInfer's kernels serve which layers, and what their plans are told."""

import logging
from functools import cache
from typing import Any

import torch

from attention.params import AttentionParams, AttentionSpec

__all__ = ["HEAD_SIZES", "announce", "plan_arguments", "reason_for_shared"]

logger = logging.getLogger(__name__)

HEAD_SIZES = (64, 128, 256)


def reason_for_shared(params: AttentionParams) -> str | None:
    """Return why the shared kernels must compute these layers, None if the library can."""
    if params.alibi_slopes is not None:
        # It makes its own from the number of heads, wrong for some models and for every rank.
        return "FlashInfer does not support ALiBi slopes"
    if params.head_size not in HEAD_SIZES:
        allowed = ", ".join(map(str, HEAD_SIZES))
        return f"FlashInfer has heads of {allowed} and not of {params.head_size}"
    if params.sliding_window is not None and not params.is_causal:
        return "FlashInfer has no window behind a query"
    return None


def plan_arguments(
    params: AttentionParams, spec: AttentionSpec, kv_dtype: torch.dtype
) -> dict[str, Any]:  # Any: mixed
    """Return what every plan is told of the layers, by the library's names."""
    return {
        "num_qo_heads": params.num_heads,
        "num_kv_heads": params.num_kv_heads,
        # The last of the keys that are seen is the query's own, which the library does not count.
        "window_left": -1 if params.sliding_window is None else params.sliding_window - 1,
        "logits_soft_cap": params.soft_cap or 0.0,
        "sm_scale": params.scale,
        "q_data_type": spec.dtype,
        "kv_data_type": kv_dtype,
    }


def announce(
    generation: str, params: AttentionParams, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Say once that kernels are loaded, since the process may be silent for a while."""
    features = [f"heads of {params.head_size}", f"{dtype} queries", f"{kv_dtype} keys"]
    features += ["a window"] if params.sliding_window is not None else []
    features += ["a soft cap"] if params.soft_cap is not None else []
    _log_once(generation, ", ".join(features))


@cache
def _log_once(generation: str, features: str) -> None:
    logger.info(
        "Loading FlashInfer's %s kernels for %s: what this machine has not compiled yet takes up "
        "to a minute.",
        generation,
        features,
    )

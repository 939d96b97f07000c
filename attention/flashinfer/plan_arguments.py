"""The arguments that all of FlashInfer's plans have, and a log line before its kernels load."""

import logging
from functools import cache
from typing import Any

import torch

from attention.params import AttentionParams, AttentionSpec

__all__ = ["log_loading", "plan_arguments"]

logger = logging.getLogger(__name__)


def plan_arguments(
    params: AttentionParams, spec: AttentionSpec, kv_dtype: torch.dtype
) -> dict[str, Any]:  # Any: mixed
    """Return the layer parameters of a plan, by the library's names."""
    return {
        "num_qo_heads": params.num_heads,
        "num_kv_heads": params.num_kv_heads,
        # The library does not count the query's own key.
        "window_left": -1 if params.sliding_window is None else params.sliding_window - 1,
        "logits_soft_cap": params.soft_cap or 0.0,
        "sm_scale": params.scale,
        "q_data_type": spec.dtype,
        "kv_data_type": kv_dtype,
    }


def log_loading(
    kernel_version: str, params: AttentionParams, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """Log once that kernels are loaded, since compiling them may take a while."""
    features = [f"head size {params.head_size}", f"{dtype} queries", f"{kv_dtype} keys"]
    features += ["sliding window"] if params.sliding_window is not None else []
    features += ["soft cap"] if params.soft_cap is not None else []
    _log_once(kernel_version, ", ".join(features))


@cache
def _log_once(kernel_version: str, features: str) -> None:
    logger.info(
        "Loading FlashInfer's %s kernels for %s; compiling them for the first time takes up to a "
        "minute.",
        kernel_version,
        features,
    )

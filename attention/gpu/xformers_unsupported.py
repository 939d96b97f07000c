"""The features that xFormers does not support. Does not import the library."""

from attention.abstract import AttentionParams, AttentionSpec

__all__ = ["SMALLEST_TILE", "unsupported_by_decode", "unsupported_by_prefill"]

SMALLEST_TILE = 16
"""The fewest keys in a step of the decode's loop; block sizes must be multiples of it."""

_DECODE_HEADS = (16, 32, 64, 128, 256)
_LARGEST_HEAD = 256
_HEAD_STEP = 8


def unsupported_by_prefill(params: AttentionParams) -> str | None:
    """Return a feature of prefills that xFormers does not support, or None."""
    if (reason := _unsupported_scores(params)) is not None:
        return reason
    if params.sliding_window is not None and not params.is_causal:
        return "a window on both sides"
    if params.head_size > _LARGEST_HEAD or params.head_size % _HEAD_STEP:
        return f"a head size of {params.head_size}"
    return None


def unsupported_by_decode(params: AttentionParams, spec: AttentionSpec) -> str | None:
    """Return a feature of decodes that xFormers does not support, or None."""
    if (reason := _unsupported_scores(params)) is not None:
        return reason
    if spec.cache_dtype != spec.dtype:
        return "an fp8 cache"
    if params.head_size not in _DECODE_HEADS:
        return f"a head size of {params.head_size}"
    if spec.block_size % SMALLEST_TILE:
        return f"a block size of {spec.block_size}"
    return None


def _unsupported_scores(params: AttentionParams) -> str | None:
    if params.soft_cap is not None:
        return "a soft cap"
    # Its biases have the model's dtype, which does not represent distances exactly.
    if params.alibi_slopes is not None:
        return "ALiBi"
    if params.has_sinks:
        return "attention sinks"
    return None

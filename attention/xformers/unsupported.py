"""What xFormers lacks, cell by cell. Does not import it."""

from attention.params import AttentionParams, AttentionSpec

__all__ = ["SMALLEST_TILE", "why_decode_is_shared", "why_prefill_is_shared"]

SMALLEST_TILE = 16
"""The fewest keys that the decode's loop takes at a time; blocks are multiples of them."""

_DECODE_HEADS = (16, 32, 64, 128, 256)
_LARGEST_HEAD = 256
_HEAD_STEP = 8


def why_prefill_is_shared(params: AttentionParams) -> str | None:
    """Return what queries of several tokens need that xFormers lacks; None if it has it all."""
    if (reason := _lack_of_scores(params)) is not None:
        return reason
    if params.sliding_window is not None and not params.is_causal:
        return "a window on both sides"
    if params.head_size > _LARGEST_HEAD or params.head_size % _HEAD_STEP:
        return f"a head size of {params.head_size}"
    return None


def why_decode_is_shared(params: AttentionParams, spec: AttentionSpec) -> str | None:
    """Return what decodes need that xFormers lacks; None if it has it all."""
    if (reason := _lack_of_scores(params)) is not None:
        return reason
    if spec.cache_dtype != spec.dtype:
        return "an fp8 cache"
    if params.head_size not in _DECODE_HEADS:
        return f"a head size of {params.head_size}"
    if spec.block_size % SMALLEST_TILE:
        return f"a block size of {spec.block_size}"
    return None


def _lack_of_scores(params: AttentionParams) -> str | None:
    if params.soft_cap is not None:
        return "a soft cap"
    # Its dense biases have the model's dtype, in which distances are not exact.
    if params.alibi_slopes is not None:
        return "ALiBi"
    return None

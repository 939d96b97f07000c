"""Features that FlashInfer does not support. Does not import FlashInfer."""

from attention.params import AttentionParams

__all__ = ["HEAD_SIZES", "reason_for_shared"]

HEAD_SIZES = (64, 128, 256)


def reason_for_shared(params: AttentionParams) -> str | None:
    """Return why the shared kernels must compute these layers, or None if the library can."""
    if params.alibi_slopes is not None:
        # It derives slopes from the number of heads: wrong for some models and for every rank.
        return "FlashInfer does not support ALiBi slopes"
    if params.has_sinks:
        return "FlashInfer's kernels do not support attention sinks"
    if params.head_size not in HEAD_SIZES:
        allowed = ", ".join(map(str, HEAD_SIZES))
        return f"FlashInfer supports head sizes {allowed} and not {params.head_size}"
    if params.sliding_window is not None and not params.is_causal:
        return "FlashInfer does not support a window on both sides"
    return None

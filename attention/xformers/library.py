"""The ops of xFormers that the backend uses, called directly.

xFormers' extension loads only with the version of torch that it was built for, and its dispatcher
rejects every op. The ops used here are Triton's or torch's own, and need neither.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from attention.xformers.unsupported import SMALLEST_TILE


@contextmanager
def _without_warnings() -> Iterator[None]:
    # On import it warns about its extension, which is not needed here, and Triton about its usage.
    log = logging.getLogger("xformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        log.setLevel(level)


with _without_warnings():
    from xformers import _cpp_lib
    from xformers.ops.fmha import attn_bias, flash, triton_splitk
    from xformers.ops.fmha.common import Inputs

__all__ = ["RAGGED_OP", "attend", "attn_bias", "decode_op"]


def _forget_frames(error: BaseException | None) -> None:
    # xFormers keeps the exception of its extension, and with it all frames of the importing call,
    # which would keep a closed engine on the GPU.
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


_forget_frames(_cpp_lib._cpp_library_load_exception)

RAGGED_OP: Any = flash.FwOp  # Any: xFormers declares no types
"""Torch's FlashAttention 2, over contiguous keys and values and not blocks."""

_LARGEST_TILE = 64
_PROGRAMS = 8448
"""Programs that fill a large GPU several times over: 64 for each of 132 multiprocessors."""
_FEWEST_KEYS = 128
"""The fewest keys of a split; with fewer, merging it costs more than it saves."""
_MOST_SPLITS = 64


class _SplitDecode(triton_splitk.FwOp):  # type: ignore[misc]  # xFormers declares no types
    """Split-k decode, with a number of splits for tables that are wider than the sequences."""

    # Partial results are padded to a multiple of this, and the padding is not read.
    MAX_BLOCK_M = 1

    @classmethod
    def get_split_k(
        cls,
        batch_size: int,
        num_kv_heads: int,
        num_heads: int,
        num_keys: int,
        num_queries: int,
        page_size: int,
        is_paged: bool = False,
    ) -> int:
        """Return how many programs share the keys of one KV head, a power of two."""
        # The original assumes full tables, and splits wide tables too much.
        wanted = _PROGRAMS // (batch_size * num_kv_heads * num_heads)
        splits = max(1, min(wanted, num_keys // _FEWEST_KEYS, _MOST_SPLITS))
        return 1 << (splits.bit_length() - 1)


_DECODE_OPS: dict[int, Any] = {  # Any: xFormers declares no types
    tile: type(f"_SplitDecode{tile}", (_SplitDecode,), {"BLOCK_N": tile})
    for tile in (SMALLEST_TILE, 2 * SMALLEST_TILE, _LARGEST_TILE)
}


def decode_op(block_size: int) -> Any:  # Any: xFormers declares no types
    """Return the op for decodes over blocks of this size, a multiple of the smallest tile."""
    return next(
        op for tile, op in sorted(_DECODE_OPS.items(), reverse=True) if block_size % tile == 0
    )


def attend(
    op: Any,  # Any: xFormers declares no types
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: Any,  # Any: xFormers declares no types
    scale: float,
) -> torch.Tensor:
    """Return the attention of `query`, `[num_queries, num_heads, head_size]`.

    `key` and `value` are `[num_keys, num_kv_heads, head_size]`. All three may be strided.
    """
    num_kv_heads = key.shape[1]
    num_queries_per_kv = query.shape[1] // num_kv_heads
    # Query heads share a KV head without a copy, by an axis with stride 0.
    key, value = (
        t[None, :, :, None].expand(-1, -1, -1, num_queries_per_kv, -1) for t in (key, value)
    )
    inputs = Inputs(
        query=query.unflatten(1, (num_kv_heads, num_queries_per_kv))[None],
        key=key,
        value=value,
        attn_bias=mask,
        scale=scale,
    )
    result: torch.Tensor = op.apply(inputs, needs_gradient=False)[0]
    return result.reshape(query.shape)

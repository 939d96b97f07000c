"""Additive biases of torch_sdpa on a CPU: causality, window and ALiBi in one tensor.

They are float32, which represents every distance exactly; bfloat16 does not above 256.
"""

import sys

import numpy as np
import numpy.typing as npt
import torch

from attention.params import AttentionParams

__all__ = ["BandedBias"]

# Few queries per tile waste fewer hidden keys, many make fewer calls.
_TILE_QUERIES = 128
# Bytes of a tensor with one element per head, query and key.
_MAX_BYTES = 16 << 20
_MIN_CAPACITY = 256


class BandedBias:
    """The bias of some adjacent queries over some adjacent keys.

    It depends only on the distance between a key and the first query. One tensor, `_band`,
    therefore serves all tiles, and the bias of a tile is a view of `_band`. Column `_before` is the
    key at the position of the first query.
    """

    def __init__(self, params: AttentionParams) -> None:
        self._params = params
        self._slopes: npt.NDArray[np.float32] | None = None
        if params.alibi_slopes is not None:
            shape = (params.num_kv_heads, params.num_queries_per_kv, 1)
            self._slopes = np.array(params.alibi_slopes, dtype=np.float32).reshape(shape)
        self._is_zero = (
            not params.is_causal and params.sliding_window is None and self._slopes is None
        )
        self._num_queries = 0
        self._capacity = 0
        self._before = 0
        self._band = torch.empty(0)

    def max_queries(self, num_keys: int) -> int:
        """Return how many queries a tile may have; makes room for this many keys."""
        if self._is_zero and self._params.has_plain_softmax:
            return sys.maxsize
        if num_keys > self._capacity:
            self._grow(max(_MIN_CAPACITY, 1 << (num_keys - 1).bit_length()))
        return self._num_queries

    def tile(self, num_queries: int, first_key: int, num_keys: int) -> torch.Tensor | None:
        """Return the bias over keys that some query sees, or None if it is zero.

        `first_key` is the distance of the first key from the first query, at most 0.
        """
        if self._is_zero or (num_queries == 1 and self._slopes is None):
            return None
        column = self._before + first_key
        return self._band[..., :num_queries, column : column + num_keys]

    def decode_shape(self, num_sequences: int, num_keys: int) -> tuple[int, int, int, int]:
        """Return the shape of the bias of decodes, `[sequences, KV heads, query heads, keys]`."""
        if self._slopes is None:
            return (num_sequences, 1, 1, num_keys)
        params = self._params
        return (num_sequences, params.num_kv_heads, params.num_queries_per_kv, num_keys)

    def fill_decode_bias(
        self,
        bias: npt.NDArray[np.float32],
        first_key: int,
        starts: npt.NDArray[np.int32],
        stops: npt.NDArray[np.int32],
    ) -> None:
        """Fill the bias of decodes that see the keys from start to stop, the last their own."""
        keys = np.arange(first_key, first_key + bias.shape[-1], dtype=np.int32)
        is_hidden = (keys < starts[:, None]) | (keys >= stops[:, None])
        if self._slopes is None:
            bias[:] = 0
        else:
            distances = (keys - (stops[:, None] - 1)).astype(np.float32)
            np.multiply(distances[:, None, None, :], self._slopes, out=bias)
        np.copyto(bias, -np.inf, where=is_hidden[:, None, None, :])

    def _grow(self, capacity: int) -> None:
        """Make room for tiles of sequences with up to `capacity` keys."""
        is_causal = self._params.is_causal
        window = self._params.sliding_window or capacity
        is_per_head = not self._params.has_plain_softmax or self._slopes is not None
        width = capacity if is_causal else 2 * capacity
        num_heads = self._params.num_heads if is_per_head else 1
        num_queries = max(8, min(_TILE_QUERIES, _MAX_BYTES // (4 * num_heads * width)))
        before = min(capacity, window)
        after = num_queries if is_causal else min(capacity, num_queries + window)
        if not self._is_zero:
            distances = np.arange(-before, after) - np.arange(num_queries)[:, None]
            band = _make_sliding_window_bias(distances, window, is_causal=is_causal)
            if self._slopes is not None:
                band = band + _make_alibi_bias(self._slopes, distances)
            with torch.inference_mode(False):
                self._band = torch.from_numpy(band)
        self._num_queries, self._capacity, self._before = num_queries, capacity, before


def _make_alibi_bias(
    slopes: npt.NDArray[np.float32], distances: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    """Return `-slope * |distance|`, `[num_kv_heads, num_queries_per_kv, *distances]`.

    `slopes` is `[num_kv_heads, num_queries_per_kv, 1]` (Press, Smith and Lewis, 2022).
    """
    bias: npt.NDArray[np.float32] = -slopes[..., None] * np.abs(distances).astype(np.float32)
    return bias


def _make_sliding_window_bias(
    distances: npt.NDArray[np.int64], window: int, *, is_causal: bool
) -> npt.NDArray[np.float32]:
    """Return 0 for keys less than `window` away, which are visible, and -inf for hidden keys."""
    is_hidden = (distances > 0) if is_causal else (distances >= window)
    is_hidden |= distances <= -window
    return np.where(is_hidden, np.float32(-np.inf), np.float32(0.0))

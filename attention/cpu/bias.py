"""Additive biases of the torch_sdpa backend: causality, window and ALiBi in one tensor.

Distances are kept in float32, which is exact for every position; bfloat16 is not above 256.
"""

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from attention.params import AttentionParams, AttentionSpec

__all__ = ["Staircase", "needs_explicit_scores"]

# Query rows of a tile: few rows waste fewer hidden keys, many rows make fewer calls.
_TILE_ROWS_ON_CPU = 128
_TILE_ROWS_ON_GPU = 512
# Bytes of a tensor with one element per head, row and key.
_MAX_BYTES = 16 << 20
_MIN_CAPACITY = 256


def needs_explicit_scores(params: AttentionParams, device: torch.device) -> bool:
    """Return whether scores must be computed one by one, for want of a kernel.

    No kernel of torch caps scores, and those for GPUs take a bias in the model's dtype only,
    which cannot hold ALiBi distances.
    """
    return params.soft_cap is not None or (params.alibi_slopes is not None and device.type != "cpu")


class Staircase:
    """The bias of a run of queries over a run of keys.

    It depends on no more than the distance between a key and the first query. So there is one
    tensor, `_corner`, whose column `_before` is the key at the position of its first row, and
    a tile is a view of it.
    """

    def __init__(self, params: AttentionParams, spec: AttentionSpec) -> None:
        self._params = params
        self._device = spec.device
        self._on_cpu = spec.device.type == "cpu"
        self._is_explicit = needs_explicit_scores(params, spec.device)
        is_float = self._on_cpu or self._is_explicit
        self._dtype = torch.float32 if is_float else spec.dtype
        # A GPU's kernel takes a bias in the dtype of the query, which numpy may not have.
        self.decode_dtype = torch.float32 if is_float else torch.bool
        self._slopes: npt.NDArray[np.float32] | None = None
        if params.alibi_slopes is not None:
            shape = (params.num_kv_heads, params.num_queries_per_kv, 1)
            self._slopes = np.array(params.alibi_slopes, dtype=np.float32).reshape(shape)
        self._is_nil = (
            not params.is_causal and params.sliding_window is None and self._slopes is None
        )
        self._rows = 0
        self._capacity = 0
        self._before = 0
        self._corner = torch.empty(0)

    def num_rows(self, num_keys: int) -> int:
        """Return how many query rows a tile may have; makes room for so many keys."""
        if self._is_nil and not self._is_explicit:
            return sys.maxsize
        if num_keys > self._capacity:
            self._grow(max(_MIN_CAPACITY, 1 << (num_keys - 1).bit_length()))
        return self._rows

    def tile(self, num_queries: int, first_key: int, num_keys: int) -> torch.Tensor | None:
        """Return the bias over keys that some query sees, or None if it is nil.

        `first_key` is the distance of the first key from the first query, at most 0.
        """
        if self._is_nil or (num_queries == 1 and self._slopes is None):
            return None
        column = self._before + first_key
        tile = self._corner[..., :num_queries, column : column + num_keys]
        return tile if self._on_cpu else tile.contiguous()

    def decode_shape(self, num_sequences: int, num_keys: int) -> tuple[int, int, int, int]:
        """Return the shape of the bias of decodes, whose query rows are the heads of a group."""
        if self._slopes is None:
            return (num_sequences, 1, 1, num_keys)
        return (num_sequences, self._params.num_kv_heads, self._params.num_queries_per_kv, num_keys)

    def fill_decode_bias(
        self,
        bias: npt.NDArray[Any],  # Any: the staging's dtype
        first_key: int,
        starts: npt.NDArray[np.int32],
        stops: npt.NDArray[np.int32],
    ) -> None:
        """Fill the bias of decodes that see the keys from start to stop, the last their own.

        A boolean bias says which keys are visible.
        """
        keys = np.arange(first_key, first_key + bias.shape[-1], dtype=np.int32)
        is_hidden = (keys < starts[:, None]) | (keys >= stops[:, None])
        if bias.dtype == np.bool_:
            np.logical_not(is_hidden[:, None, None, :], out=bias)
            return
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
        is_per_head = self._is_explicit or self._slopes is not None
        width = capacity if is_causal else 2 * capacity
        num_heads = self._params.num_heads if is_per_head else 1
        rows = _TILE_ROWS_ON_CPU if self._on_cpu else _TILE_ROWS_ON_GPU
        rows = max(8, min(rows, _MAX_BYTES // (4 * num_heads * width)))
        before = min(capacity, window)
        after = rows if is_causal else min(capacity, rows + window)
        if not self._is_nil:
            distances = np.arange(-before, after) - np.arange(rows)[:, None]
            corner = _make_sliding_window_bias(distances, window, is_causal=is_causal)
            if self._slopes is not None:
                corner = corner + _make_alibi_bias(self._slopes, distances)
            with torch.inference_mode(False):
                self._corner = torch.from_numpy(corner).to(self._device, self._dtype)
        self._rows, self._capacity, self._before = rows, capacity, before


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
    """Return 0 for keys less than `window` away, and -inf for others and what is not causal."""
    is_hidden = (distances > 0) if is_causal else (distances >= window)
    is_hidden |= distances <= -window
    return np.where(is_hidden, np.float32(-np.inf), np.float32(0.0))

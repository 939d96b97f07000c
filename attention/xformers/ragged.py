"""Prefills and encoders by FlashAttention 2, over contiguous keys and values."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.gpu.batch import SubBatch
from attention.gpu.layer_kernels import LayerCache
from attention.kernels.triton.gather_blocks import gather_blocks
from attention.params import AttentionParams
from attention.xformers.library import RAGGED_OP, attend, attn_bias

__all__ = ["RaggedAttention"]


class _Gather(NamedTuple):
    """The cached keys that are read."""

    starts: torch.Tensor
    """First key, `[num_sequences]` int32."""
    cu_lens: torch.Tensor
    """Gathered keys before each sequence, `[num_sequences + 1]` int32."""
    num_keys: int
    longest: int
    mask: Any  # Any: xFormers declares no types


class RaggedAttention:
    """Attends for queries of several tokens; the first layer of a step makes its masks."""

    def __init__(self, params: AttentionParams) -> None:
        self._params = params
        self._masks: dict[SubBatch, Any] = {}  # Any: xFormers declares no types
        self._gathers: dict[SubBatch, _Gather] = {}

    def forget_step(self) -> None:
        """Forget the masks and gathers of the last step."""
        self._masks.clear()
        self._gathers.clear()

    def prefill_ragged(
        self,
        sub_batch: SubBatch,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend to the keys of each sequence's own tokens, without the cache."""
        if sub_batch not in self._masks:
            info = _lengths_info(sub_batch.query_starts, sub_batch.query_lens)
            self._masks[sub_batch] = self._mask(info, info)
        scale = self._params.scale
        out.copy_(attend(RAGGED_OP, query, key, value, mask=self._masks[sub_batch], scale=scale))

    def prefill(
        self, sub_batch: SubBatch, query: torch.Tensor, cache: LayerCache, out: torch.Tensor
    ) -> None:
        """Attend over cached keys, which are gathered and, if fp8, widened."""
        if sub_batch not in self._gathers:
            self._gathers[sub_batch] = self._gather(sub_batch)
        starts, cu_lens, num_keys, longest, mask = self._gathers[sub_batch]
        assert sub_batch.block_tables is not None
        key = query.new_empty(num_keys, self._params.num_kv_heads, self._params.head_size)
        value = torch.empty_like(key)
        # fp8 values are widened exactly. Their scales are applied to the scores and to the result,
        # where they cause no additional rounding.
        gather_blocks(
            cache.blocks,
            block_tables=sub_batch.block_tables,
            starts=starts,
            cu_lens=cu_lens,
            max_len=longest,
            key=key,
            value=value,
        )
        scale = self._params.scale * cache.k_scale
        result = attend(RAGGED_OP, query, key, value, mask=mask, scale=scale)
        if cache.v_scale == 1.0:
            out.copy_(result)
        else:
            torch.mul(result, cache.v_scale, out=out)

    def _gather(self, sub_batch: SubBatch) -> _Gather:
        """Return the keys that any of the queries sees: all, unless there is a window."""
        host_lens = sub_batch.host_seq_lens
        lens, starts = sub_batch.seq_lens, torch.zeros_like(sub_batch.seq_lens)
        window = self._params.sliding_window
        if window is not None:
            host_lens = np.minimum(host_lens, sub_batch.query_lens + np.int32(window - 1))
            query_lens = sub_batch.query_starts[1:] - sub_batch.query_starts[:-1]
            starts = (lens - query_lens - (window - 1)).clamp_(min=0)
            lens = lens - starts
        cu_lens = torch.zeros(len(lens) + 1, dtype=torch.int32, device=lens.device)
        torch.cumsum(lens, 0, dtype=torch.int32, out=cu_lens[1:])
        query_info = _lengths_info(sub_batch.query_starts, sub_batch.query_lens)
        return _Gather(
            starts=starts,
            cu_lens=cu_lens,
            num_keys=int(host_lens.sum()),
            longest=int(host_lens.max()),
            mask=self._mask(query_info, _lengths_info(cu_lens, host_lens)),
        )

    def _mask(self, queries: Any, keys: Any) -> Any:  # Any: xFormers declares no types
        """Return the mask between sequences of queries and of keys, aligned at their ends."""
        if not self._params.is_causal:
            return attn_bias.BlockDiagonalMask(queries, keys)
        window = self._params.sliding_window
        if window is None:
            return attn_bias.BlockDiagonalCausalFromBottomRightMask(queries, keys)
        return attn_bias.BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            queries, keys, _window_size=window
        )


def _lengths_info(
    starts: torch.Tensor, lens: npt.NDArray[np.int32]
) -> Any:  # Any: xFormers declares no types
    """Return xFormers' record of sequence lengths, without the copy that its constructor makes."""
    return attn_bias._SeqLenInfo(
        seqstart=starts,
        max_seqlen=int(lens.max()),
        min_seqlen=int(lens.min()),
        seqstart_py=[0, *np.cumsum(lens).tolist()],
    )

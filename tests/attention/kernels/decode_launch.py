"""One launch of the decode kernel, whose plan the product keeps for all layers."""

import torch

from attention.kernels.arguments import DecodeItems, NewTokens
from attention.kernels.triton.paged_decode import PagedDecode
from attention.kernels.triton.tuning import AttentionOptions, PagedAttentionTuning


def paged_decode(
    query: torch.Tensor,
    layer_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    items: DecodeItems,
    options: AttentionOptions,
    tuning: PagedAttentionTuning,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    new: NewTokens | None = None,
) -> None:
    """Attend for one layer of decodes, `[B, num_heads, head_size]`."""
    decode = PagedDecode(
        query,
        layer_cache,
        out,
        block_tables=block_tables,
        items=items,
        options=options,
        tuning=tuning,
        lse=lse,
        has_sinks=sinks is not None,
        new=new,
    )
    decode.launch(query, layer_cache[:, 0], layer_cache[:, 1], out, sinks, new)

"""Items of decodes for tests, with scratch memory that is full of NaN."""

import numpy as np
import torch
from numpy.typing import NDArray

from attention.gpu.decode_schedule import DecodeDivision, SplitCosts
from attention.kernels.arguments import DecodeItems, DecodeScratch
from attention.kernels.triton.tuning import PagedAttentionTuning


class EvenSplits(SplitCosts):
    """Splits every range into so many parts, or into tiles."""

    def __init__(self, num_splits: int) -> None:
        super().__init__(num_slots=num_splits, num_saturating=1.0)

    def max_items(self, num_units: int) -> int:
        return num_units * self.num_slots + 3

    def splits(self, tiles: NDArray[np.int32], max_items: int) -> NDArray[np.int32]:
        return np.clip(tiles, 1, self.num_slots)


def decode_items(
    num_heads: int,
    layer_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: torch.Tensor,
    tuning: PagedAttentionTuning,
    *,
    num_splits: int = 1,
    window: int | None = None,
) -> DecodeItems:
    """Return the items of decodes, and behind them some without work.

    `num_splits` is that of a sequence which has all keys. A range of keys is split no further than
    into tiles.
    """
    _, _, block_size, num_kv_heads, head_size = layer_cache.shape
    division = DecodeDivision(
        block_size=block_size,
        tile_keys=tuning.tile_keys,
        rows_per_item=max(1, tuning.tile_vectors * num_kv_heads // num_heads),
        costs=EvenSplits(num_splits),
        window=window,
    )
    lens = seq_lens.cpu().numpy()
    prefixes = division.cached_prefixes()
    items = torch.from_numpy(division.items(lens, tables.cpu().numpy(), prefixes))
    words = torch.zeros(division.max_items(len(lens)), items.shape[1], dtype=torch.int32)
    words[: len(items)] = items
    max_parts = division.max_parts(len(lens))
    num_elements = max_parts * num_heads * (head_size + 1)
    num_arrivals = len(lens) * num_kv_heads
    device = seq_lens.device
    return DecodeItems(
        words.to(device),
        max_parts,
        DecodeScratch(
            torch.full((num_elements,), torch.nan, device=device),
            torch.zeros(num_arrivals, dtype=torch.int32, device=device),
        ),
    )

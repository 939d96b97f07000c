"""The columns of a checkpoint that make the queries, keys and values of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.layers.linear import Columns, columns_of
from workers.layers.weight import part_of

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.parallel.group import ParallelGroup

__all__ = ["qkv_columns"]


def qkv_columns(prefix: str, config: ModelConfig, group: ParallelGroup) -> list[Columns]:
    """Return the columns of this rank's heads: all queries, then all keys, then all values.

    KV heads are replicated if there are more ranks than KV heads.
    """
    names = [f"{prefix}.{name}" for name in config.names.qkv]
    if config.names.is_qkv_by_head:
        (name,) = names
        return _columns_by_head(name, config, group)
    size = config.head_size
    query_size, kv_size = config.num_heads * size, config.num_kv_heads * size
    first = group.rank * config.num_kv_heads // group.size * size
    key_value = slice(first, first + max(1, config.num_kv_heads // group.size) * size)
    query = part_of(query_size, group)
    return columns_of(names, [(query_size, query), (kv_size, key_value), (kv_size, key_value)])


def _columns_by_head(name: str, config: ModelConfig, group: ParallelGroup) -> list[Columns]:
    """Return the columns of a fused tensor with output columns `[num_heads, 3, head_size]`."""
    assert config.num_kv_heads == config.num_heads
    size = config.head_size
    heads = part_of(config.num_heads, group)
    firsts = [
        (3 * head + kind) * size for kind in range(3) for head in range(heads.start, heads.stop)
    ]
    total = 3 * config.num_heads * size
    return [Columns(name=name, total=total, part=slice(i, i + size)) for i in firsts]

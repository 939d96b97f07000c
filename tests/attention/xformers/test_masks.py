"""Our masks against those of the library's constructors."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.abstract import AttentionBatch, AttentionParams, AttentionSpec, AttentionType
from attention.gpu.batch import GpuBatchUploader, SubBatch
from attention.gpu.layer_kernels import LayerCache
from tests.attention.rig import params_of

pytest.importorskip("triton")
pytest.importorskip("xformers")

from attention.gpu.xformers_kernels import (
    PagedDecodes,
    RaggedAttention,
    _layer_slots,
    attn_bias,
    decode_op,
)

CPU = torch.device("cpu")
PLAIN = params_of(8, 2, 64)
CROSS = replace(PLAIN, attention_type=AttentionType.ENCODER_DECODER)
SEQ_LENS = [33, 1, 16, 17, 50]


def spec_of(*layers: AttentionParams) -> AttentionSpec:
    """Return a model of these layers."""
    return AttentionSpec(layers=layers, dtype=torch.bfloat16, device=CPU, block_size=16)


def rows_of(query_lens: list[int], seq_lens: list[int], *, num_prefills: int) -> SubBatch:
    """Return sequences with blocks 1, 2, 3, ..."""
    width = -(-max(seq_lens) // 16)
    batch = AttentionBatch(
        num_prefills=num_prefills,
        query_lens=np.array(query_lens, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_tables=1 + np.arange(len(seq_lens) * width, dtype=np.int32).reshape(-1, width),
        slot_mapping=np.full(sum(query_lens), -1, dtype=np.int64),
    )
    uploaded = GpuBatchUploader(CPU).upload(batch)
    rows = uploaded.prefills if num_prefills else uploaded.decodes
    assert rows is not None
    return rows


@pytest.mark.parametrize("window", [None, 1, 16, 20])
def test_decode_mask_is_that_of_the_constructor(window: int | None) -> None:
    params = replace(PLAIN, sliding_window=window)
    rows = rows_of([1] * 5, SEQ_LENS, num_prefills=0)
    decodes = PagedDecodes(params, spec_of(params, params, params), is_graph=False)
    assert rows.block_tables is not None
    decodes.plan_decodes(rows.seq_lens, rows.max_seq_len, rows.block_tables)
    mask = decodes._mask
    assert mask.block_tables.shape == (8, 4)
    assert torch.equal(mask.block_tables[:5], rows.block_tables * 6)
    assert mask.k_seqinfo.seqlen.tolist() == [*SEQ_LENS, 0, 0, 0]
    if window is None:
        expected = attn_bias.PagedBlockDiagonalPaddedKeysMask
    else:
        expected = attn_bias.PagedBlockDiagonalGappyKeysMask
        starts = [max(0, length - window) for length in SEQ_LENS]
        assert mask.k_seqinfo.seqstart.tolist() == [*starts, 0, 0, 0]
    assert type(mask) is expected


def test_graph_keeps_the_tensors_of_its_mask() -> None:
    params = replace(PLAIN, sliding_window=20)
    decodes = PagedDecodes(params, spec_of(params), is_graph=True)
    tables = torch.arange(6, dtype=torch.int32).view(2, 3)
    decodes.plan_decodes(torch.tensor([48, 3], dtype=torch.int32), 48, tables)
    mask = decodes._mask
    decodes.plan_decodes(torch.tensor([9, 44], dtype=torch.int32), 48, tables + 1)
    assert decodes._mask is mask
    assert mask.k_seqinfo.seqlen.tolist() == [9, 44]
    assert mask.k_seqinfo.seqstart.tolist() == [0, 24]
    assert torch.equal(mask.block_tables, 2 * (tables + 1))


def test_scaled_tables_find_a_layers_keys_and_values() -> None:
    pool = torch.arange(5 * 3 * 2 * 16 * 2 * 4).view(5, 3, 2, 16, 2, 4)
    for place in range(3):
        cache = LayerCache(pool[:, place], pool, place, 1.0, 1.0)
        keys, values = _layer_slots(cache)
        for block in range(5):
            start = block * 6 * 16
            assert torch.equal(keys[start : start + 16], pool[block, place, 0])
            assert torch.equal(values[start : start + 16], pool[block, place, 1])
        assert len(keys) % 16 == len(values) % 16 == 0


@pytest.mark.parametrize("window", [None, 1, 7])
def test_chunks_see_what_they_should(window: int | None) -> None:
    params = replace(PLAIN, sliding_window=window)
    rows = rows_of([3, 9, 1], [20, 9, 13], num_prefills=3)
    gather = RaggedAttention(params)._gather(rows)
    lens = np.diff(gather.cu_lens.numpy())
    assert gather.num_keys == lens.sum()
    assert gather.longest == lens.max()
    visible = gather.mask.materialize((13, gather.num_keys)).exp() > 0
    for i, (query_len, seq_len) in enumerate(zip([3, 9, 1], [20, 9, 13], strict=True)):
        first_query, first_row = int(rows.query_starts[i]), int(gather.cu_lens[i])
        for query in range(query_len):
            position = seq_len - query_len + query
            seen = visible[first_query + query].nonzero()[:, 0] - first_row + gather.starts[i]
            first = 0 if window is None else max(0, position - window + 1)
            assert seen.tolist() == list(range(first, position + 1))


def test_cross_attention_sees_all_keys_of_its_own_encoder() -> None:
    rows = rows_of([3, 9, 1], [5, 1, 13], num_prefills=3)
    gather = RaggedAttention(CROSS)._gather(rows)
    visible = gather.mask.materialize((13, 19)).exp() > 0
    assert visible.sum(1).tolist() == [5] * 3 + [1] * 9 + [13]


@pytest.mark.parametrize(
    ("block_size", "tile"), [(16, 16), (32, 32), (48, 16), (64, 64), (128, 64)]
)
def test_tile_of_a_decode_divides_the_block(block_size: int, tile: int) -> None:
    keys_at_a_time: int = decode_op(block_size).BLOCK_N
    assert keys_at_a_time == tile


@pytest.mark.parametrize(
    ("batch_size", "num_keys", "splits"),
    [(64, 2048, 16), (64, 32768, 16), (1, 8192, 64), (1, 100, 1), (256, 8192, 4), (4096, 8192, 1)],
)
def test_splits_fill_the_gpu_and_no_more(batch_size: int, num_keys: int, splits: int) -> None:
    assert decode_op(16).get_split_k(batch_size, 8, 1, num_keys, 1, 16, True) == splits

"""Steps of a batch of decodes on the device, against the batch on the host."""

import numpy as np
import torch

from attention.batch import AttentionBatch
from attention.kernels.triton.advance import advance
from tests.attention.kernels.kernel_device import DEVICE


def test_steps_equal_those_of_the_batch_on_the_host() -> None:
    num_rows, block_size = 300, 4
    tables = torch.randint(0, 2**31 - 1, (num_rows, 6), dtype=torch.int32)
    lengths = torch.randint(1, 20, (num_rows,), dtype=torch.int32)
    batch = AttentionBatch(
        num_prefills=0,
        query_lens=np.ones(num_rows, np.int32),
        seq_lens=lengths.numpy(),
        block_tables=tables.numpy(),
        slot_mapping=np.zeros(num_rows, np.int64),
    )
    seq_lens, slots = lengths.to(DEVICE, copy=True), torch.zeros(num_rows).long().to(DEVICE)
    for _ in range(4):
        advance(seq_lens, slots, tables.to(DEVICE), block_size=block_size)
        batch = batch.advanced(block_size)
        assert seq_lens.tolist() == batch.seq_lens.tolist()
        assert slots.tolist() == batch.slot_mapping.tolist()


def test_padding_stays_as_it_is() -> None:
    seq_lens = torch.tensor([0, 0, 3], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([11, -1, 9, -1], device=DEVICE)
    tables = torch.tensor([[2**31 - 1] * 2, [2**31 - 1] * 2, [2, 0]], dtype=torch.int32)
    advance(seq_lens, slots, tables.to(DEVICE), block_size=4)
    assert seq_lens.tolist() == [0, 0, 4]
    assert slots.tolist() == [11, -1, 11, -1]


def test_row_with_a_full_table_becomes_padding() -> None:
    seq_lens = torch.tensor([7, 8], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([14, 7], device=DEVICE)
    tables = torch.tensor([[0, 3], [0, 1]], dtype=torch.int32, device=DEVICE)
    for _ in range(3):
        advance(seq_lens, slots, tables, block_size=4)
    assert seq_lens.tolist() == [8, 8]
    assert slots.tolist() == [-1, -1]

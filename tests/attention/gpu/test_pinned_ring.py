"""Buffers from which a GPU reads: each waits for what has read it before."""

from __future__ import annotations

import pytest
import torch

from attention.gpu.batch import PinnedRing, copy_from_host


def test_a_buffer_keeps_its_words_until_its_next_turn() -> None:
    ring = PinnedRing(torch.device("cpu"), num_buffers=2)
    buffers = []
    for value, size in ((1, 3), (2, 5)):
        with ring.next_buffer(size) as words:
            words.fill_(value)
            buffers.append(words)
    assert [words.tolist() for words in buffers] == [[1] * 3, [2] * 5]
    with ring.next_buffer(4) as third:
        assert third.data_ptr() == buffers[0].data_ptr()
    with ring.next_buffer(9) as fourth:
        # The larger buffer is another one.
        assert len(fourth) == 9
        assert buffers[1].tolist() == [2] * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_busy_gpu_reads_what_each_upload_has_written() -> None:
    device = torch.device("cuda")
    ring, uploaded = PinnedRing(device, num_buffers=2), []
    for value in range(50):
        torch.cuda._sleep(1_000_000)
        target = torch.empty(1000, dtype=torch.int64, device=device)
        with ring.next_buffer(1000) as words:
            words.fill_(value)
            copy_from_host(target, words)
        uploaded.append(target)
    assert [int(target.min()) for target in uploaded] == list(range(50))
    assert [int(target.max()) for target in uploaded] == list(range(50))

"""Copies between pinned host memory and the device, against indexing in torch."""

import pytest
import torch

from attention.kernels.triton.pinned_copy import append_tokens, copy_words, place_tokens
from tests.attention.kernels.kernel_device import DEVICE

NUM_ROWS, LENGTH = 37, 51


def pinned(words: torch.Tensor) -> torch.Tensor:
    return words.pin_memory() if torch.cuda.is_available() else words


def random_table() -> torch.Tensor:
    return torch.randint(0, 128256, (NUM_ROWS, LENGTH), device=DEVICE)


@pytest.mark.parametrize("num_words", [0, 1, 16, 255, 1000])
def test_words_are_copied_both_ways(num_words: int) -> None:
    host = pinned(torch.randint(-(2**62), 2**62, (num_words,)))
    device = torch.zeros(num_words + 1, dtype=torch.int64, device=DEVICE)
    back = pinned(torch.zeros(num_words + 1, dtype=torch.int64))
    copy_words(device[:num_words], host)
    copy_words(back, device)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert back.tolist() == [*host.tolist(), 0]


@pytest.mark.parametrize(("num_tokens", "num_others"), [(1, 6), (16, 0), (300, 8), (3, 700)])
def test_tokens_of_a_step_are_those_of_the_table(num_tokens: int, num_others: int) -> None:
    table = random_table()
    rows = torch.randint(0, NUM_ROWS, (num_tokens,))
    columns = torch.randint(0, LENGTH, (num_tokens,))
    others = torch.randint(0, 2**40, (num_others,))
    token_ids = torch.full((num_tokens + 2,), -7, device=DEVICE)
    positions, copied = token_ids.clone(), torch.zeros_like(others, device=DEVICE)
    host = pinned(torch.cat((rows, columns, others)))
    place_tokens(token_ids[:num_tokens], positions[:num_tokens], copied, host, table)
    assert token_ids.tolist() == [*table.cpu()[rows, columns].tolist(), -7, -7]
    assert positions.tolist() == [*columns.tolist(), -7, -7]
    assert copied.tolist() == others.tolist()


@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_sampled_tokens_reach_the_table_and_the_host(num_tokens: int) -> None:
    table = random_table()
    rows = torch.randperm(NUM_ROWS)[:num_tokens]
    columns = torch.randint(0, LENGTH, (num_tokens,))
    token_ids = torch.randint(0, 128256, (num_tokens,))
    token_ids[::2] = -1
    host = pinned(torch.zeros(num_tokens, dtype=torch.int64))
    expected = table.cpu()
    expected[rows, columns] = token_ids.clamp(min=0)
    append_tokens(table, rows.to(DEVICE), columns.to(DEVICE), token_ids.to(DEVICE), host)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    assert host.tolist() == token_ids.tolist()
    assert torch.equal(table.cpu(), expected)

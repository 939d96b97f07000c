"""Rows of another rank that have arrived, with that rank made here."""

import threading

import pytest
import torch
from torch.nn import functional

from attention.kernels.triton.received_rows import (
    ReceivedRows,
    add_received,
    add_received_norm,
)
from tests.attention.kernels.kernel_device import DEVICE
from tests.attention.kernels.test_triton_token_rows import DTYPES, assert_near

NUM_ROWS, WIDTH, EPS = 5, 80, 1e-5


class Sender:
    """What another rank has sent, and the word in host memory that ends waits for it."""

    def __init__(self, rows: torch.Tensor, *, flag: int = 7) -> None:
        self.abort = torch.zeros(1, dtype=torch.int32)
        if DEVICE == "cuda":
            self.abort = self.abort.pin_memory()
        self.flag = torch.full((1,), flag, dtype=torch.int32, device=DEVICE)
        self.received = ReceivedRows(
            rows=rows,
            flag=self.flag,
            number=torch.full((1,), 7, dtype=torch.int32, device=DEVICE),
            abort=torch.tensor([self.abort.data_ptr()], device=DEVICE),
        )


def rows_of_two(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what each rank adds, here rows of a wider matrix, and there the first of more rows."""
    mine, theirs = torch.randn(2, NUM_ROWS + 3, WIDTH + 8).to(dtype).to(DEVICE)
    return mine[:NUM_ROWS, :WIDTH], theirs[:, :WIDTH].contiguous()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_both_ranks_are_summed(dtype: torch.dtype) -> None:
    mine, theirs = rows_of_two(dtype)
    total = mine.double() + theirs[:NUM_ROWS].double()
    sender = Sender(theirs)
    add_received(mine, sender.received)
    assert_near(mine, total)
    assert int(sender.received.number) == 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_sum_is_added_to_the_stream_and_normed(has_bias: bool, dtype: torch.dtype) -> None:
    mine, theirs = rows_of_two(dtype)
    stream = torch.randn(2 * NUM_ROWS, WIDTH).to(dtype).to(DEVICE)
    untouched = stream[NUM_ROWS:].clone()
    half = stream[:NUM_ROWS]
    weight, bias = torch.randn(2, WIDTH).to(dtype).to(DEVICE)
    total = half.double() + mine.double() + theirs[:NUM_ROWS].double()
    sent = mine.clone()
    normed = add_received_norm(
        half,
        mine,
        Sender(theirs).received,
        weight,
        bias if has_bias else None,
        EPS,
        is_centered=has_bias,
    )
    assert_near(half, total)
    expected = functional.rms_norm(half.double(), (WIDTH,), weight.double(), EPS)
    if has_bias:
        expected = functional.layer_norm(
            half.double(), (WIDTH,), weight.double(), bias.double(), EPS
        )
    assert_near(normed, expected)
    assert torch.equal(stream[NUM_ROWS:], untouched)
    assert torch.equal(mine, sent)


@pytest.mark.skipif(DEVICE == "cuda", reason="CUDA's calls may wait for the kernel that waits")
def test_rows_are_read_after_the_flag_has_the_number() -> None:
    mine, theirs = rows_of_two(torch.float32)
    total = mine.double() + theirs[:NUM_ROWS].double()
    arriving = torch.full_like(theirs, torch.nan)
    sender = Sender(arriving, flag=6)

    @torch.inference_mode()
    def arrive() -> None:
        arriving.copy_(theirs)
        sender.flag.fill_(7)

    timer = threading.Timer(0.3, arrive)
    timer.start()
    add_received(mine, sender.received)
    timer.join()
    assert_near(mine, total)


def test_an_abort_ends_the_wait_for_a_rank_that_is_gone() -> None:
    mine, theirs = rows_of_two(torch.float32)
    sender = Sender(theirs, flag=6)
    sender.abort.fill_(1)
    add_received(mine, sender.received)
    assert int(sender.flag) == 6

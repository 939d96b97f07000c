"""The all-reduce of a few rows, as one rank runs it, with the packets of the others made here."""

import pytest
import torch
from torch.nn import functional

from attention.kernels.triton.one_shot_all_reduce import (
    Inboxes,
    all_reduce_add_norm,
    all_reduce_rows,
    inbox_bytes,
)
from tests.attention.kernels.paged_case import DEVICE
from tests.attention.kernels.test_triton_token_rows import DTYPES, assert_near

MAX_ROWS = 4
EPS = 1e-5


class Rank:
    """One rank of a group whose other ranks are this test."""

    def __init__(
        self, rank: int, size: int, width: int, dtype: torch.dtype, max_programs: int = MAX_ROWS
    ) -> None:
        num_bytes = inbox_bytes(MAX_ROWS, width, dtype, size)
        self.inboxes = [
            torch.zeros(num_bytes // 8, dtype=torch.int64).view(2, size, MAX_ROWS, -1).to(DEVICE)
            for _ in range(size)
        ]
        self.abort = torch.zeros(1, dtype=torch.int32)
        if DEVICE == "cuda":
            self.abort = self.abort.pin_memory()
        addresses = [inbox.data_ptr() for inbox in self.inboxes] + [self.abort.data_ptr()]
        self.view = Inboxes(
            addresses=torch.tensor(addresses, device=DEVICE),
            num_launches=torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE),
            rank=rank,
            size=size,
            max_programs=max_programs,
            width=width,
            dtype=dtype,
        )

    def receive(self, sender: int, rows: torch.Tensor) -> None:
        """Put the packets of another rank's next launch into this rank's inbox."""
        launch = int(self.view.num_launches[0]) + 1
        self.inboxes[self.view.rank][launch % 2, sender, : len(rows)] = packets(rows, launch)

    def assert_sent(self, rows: torch.Tensor) -> None:
        """Check that every other rank has the packets of the last launch."""
        launch, view = int(self.view.num_launches[0]), self.view
        for peer in set(range(view.size)) - {view.rank}:
            inbox = self.inboxes[peer][launch % 2, view.rank, : len(rows)]
            assert torch.equal(inbox, packets(rows, launch))


def packets(rows: torch.Tensor, launch: int) -> torch.Tensor:
    """Return the packets of rows, `[num_rows, num_packets]` int64."""
    data = rows.contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return data | (launch << 32)


def parts(size: int, num_rows: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return what each rank adds: rows of a wider matrix."""
    return [torch.randn(num_rows, width + 8).to(dtype).to(DEVICE)[:, :width] for _ in range(size)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (2, 3)])
@pytest.mark.parametrize("width", [16, 80])
def test_rows_of_all_ranks_are_summed_launch_after_launch(
    width: int, rank: int, size: int, dtype: torch.dtype
) -> None:
    one = Rank(rank, size, width, dtype)
    for num_rows in (1, 1, 1, 1):
        rows = parts(size, num_rows, width, dtype)
        total = torch.stack([part.double() for part in rows]).sum(0)
        for peer in set(range(size)) - {rank}:
            one.receive(peer, rows[peer])
        sent = rows[rank].clone()
        all_reduce_rows(rows[rank], one.view)
        assert_near(rows[rank], total)
        one.assert_sent(sent)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("max_programs", [1, 3, MAX_ROWS])
def test_the_sum_is_added_to_the_stream_and_normed(
    max_programs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    width = 80
    one = Rank(1, 2, width, dtype, max_programs)
    rows = parts(2, MAX_ROWS, width, dtype)
    one.receive(0, rows[0])
    stream = torch.randn(MAX_ROWS, width).to(dtype).to(DEVICE)
    weight, bias = torch.randn(2, width).to(dtype).to(DEVICE)
    total = stream.double() + rows[0].double() + rows[1].double()
    normed = all_reduce_add_norm(
        stream,
        rows[1],
        weight,
        bias if has_bias else None,
        EPS,
        is_centred=has_bias,
        inboxes=one.view,
    )
    assert_near(stream, total)
    expected = functional.rms_norm(stream.double(), (width,), weight.double(), EPS)
    if has_bias:
        expected = functional.layer_norm(
            stream.double(), (width,), weight.double(), bias.double(), EPS
        )
    assert_near(normed, expected)
    one.assert_sent(rows[1])


def test_packets_of_an_earlier_launch_are_not_taken() -> None:
    one = Rank(0, 2, 16, torch.float32)
    # What the other rank sent two launches ago is still in its place.
    one.inboxes[0][:, 1, :1] = packets(torch.full((1, 16), 7.0), -1)
    one.receive(1, torch.ones(1, 16))
    rows = torch.ones(1, 16, device=DEVICE)
    all_reduce_rows(rows, one.view)
    assert torch.equal(rows, torch.full_like(rows, 2.0))


def test_an_abort_ends_the_wait_for_a_rank_that_is_gone() -> None:
    one = Rank(0, 2, 16, torch.float32)
    one.abort.fill_(1)
    all_reduce_rows(torch.ones(1, 16, device=DEVICE), one.view)
    assert int(one.view.num_launches[0]) == 1

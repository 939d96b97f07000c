"""The all-reduce of a few rows, as one rank runs it, with the data of the others made here."""

import threading

import pytest
import torch
from torch.nn import functional

from attention.kernels.triton.one_shot_all_reduce import (
    EMPTY_BYTE,
    Inboxes,
    all_reduce_add_norm,
    all_reduce_rows,
    inbox_bytes,
)
from attention.kernels.triton.received_rows import ReceivedRows, add_received, add_received_norm
from tests.attention.kernels.kernel_device import DEVICE
from tests.attention.kernels.test_triton_rows import DTYPES, assert_near

MAX_ROWS = 11
EMPTY = -1
EPS = 1e-5
NUM_ROWS, WIDTH, EPS_OF_RECEIVED_ROWS = 5, 80, 1e-5


class Rank:
    """One rank of a group whose other ranks are this test."""

    def __init__(
        self, rank: int, size: int, width: int, dtype: torch.dtype, max_programs: int = MAX_ROWS
    ) -> None:
        num_bytes = inbox_bytes(MAX_ROWS, width, dtype, size)
        empty = torch.full((num_bytes,), EMPTY_BYTE, dtype=torch.uint8).view(torch.int32)
        self.inboxes = [
            empty.clone().view(2, size - 1, MAX_ROWS, -1).to(DEVICE) for _ in range(size)
        ]
        self.abort = torch.zeros(1, dtype=torch.int32)
        if DEVICE == "cuda":
            self.abort = self.abort.pin_memory()
        addresses = [inbox.data_ptr() for inbox in self.inboxes] + [self.abort.data_ptr(), 0]
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
        """Put what another rank sends in its next launch into this rank's inbox."""
        inbox = self.inboxes[self.view.rank][self._parity(1), self._slot(sender, self.view.rank)]
        inbox[: len(rows)] = words(rows)

    def assert_sent(self, rows: torch.Tensor) -> None:
        """Check that every other rank has the rows of the last launch, and this one has none."""
        view, parity = self.view, self._parity(0)
        for peer in set(range(view.size)) - {view.rank}:
            inbox = self.inboxes[peer][parity, self._slot(view.rank, peer)]
            assert torch.equal(inbox[: len(rows)], words(rows))
        assert (self.inboxes[view.rank] == EMPTY).all()

    def _parity(self, num_ahead: int) -> int:
        return (int(self.view.num_launches[0]) + num_ahead) % 2

    def _slot(self, sender: int, receiver: int) -> int:
        return sender - (sender > receiver)


def words(rows: torch.Tensor) -> torch.Tensor:
    """Return rows as they are sent, `[num_rows, num_words]` int32."""
    return rows.contiguous().view(torch.int32)


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
@pytest.mark.parametrize("max_programs", [1, 4, MAX_ROWS])
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
        is_centered=has_bias,
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_the_bits_of_an_empty_place_arrives(dtype: torch.dtype) -> None:
    one = Rank(0, 2, 16, dtype)
    one.receive(1, torch.ones(1, 16, dtype=dtype))
    num_words = 16 * dtype.itemsize // 4
    rows = torch.full((1, num_words), EMPTY, dtype=torch.int32).view(dtype).to(DEVICE)
    all_reduce_rows(rows, one.view)
    assert rows.isnan().all()
    sent = one.inboxes[1][1, 0, 0].cpu()
    assert (sent != EMPTY).all()
    assert sent.view(dtype).isnan().all()


@pytest.mark.parametrize("max_programs", [1, 3, MAX_ROWS])
def test_an_abort_ends_the_waits_for_a_rank_that_is_gone(max_programs: int) -> None:
    one = Rank(0, 2, 16, torch.float32, max_programs)
    one.abort.fill_(1)
    all_reduce_rows(torch.ones(MAX_ROWS, 16, device=DEVICE), one.view)
    assert one.view.num_launches.tolist() == [1] * MAX_ROWS


def test_a_program_learns_of_an_abort_from_another_one() -> None:
    one = Rank(0, 2, 16, torch.float32)
    one.view.addresses[-1] = 1
    all_reduce_rows(torch.ones(MAX_ROWS, 16, device=DEVICE), one.view)
    assert one.view.num_launches.tolist() == [1] * MAX_ROWS


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
def test_the_sum_is_added_to_the_stream_and_normed_of_received_rows(
    has_bias: bool, dtype: torch.dtype
) -> None:
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
        EPS_OF_RECEIVED_ROWS,
        is_centered=has_bias,
    )
    assert_near(half, total)
    expected = functional.rms_norm(half.double(), (WIDTH,), weight.double(), EPS_OF_RECEIVED_ROWS)
    if has_bias:
        expected = functional.layer_norm(
            half.double(), (WIDTH,), weight.double(), bias.double(), EPS_OF_RECEIVED_ROWS
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

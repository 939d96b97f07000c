"""One rank on a GPU of its own: `one_shot_process RANK SIZE FOLDER PORT...`.

Sums rows with the one-shot kernel, beside products and with NCCL, and saves them as
FOLDER/rankN.pt. Then it waits for a rank that never comes, is aborted, and joins the group again,
the second time with a kernel that does not compile.
"""

import random
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import torch

from attention.kernels.triton import one_shot_all_reduce
from attention.kernels.triton.norm_rope import add_norm
from workers.parallel.all_reduce import OneShotAllReduce
from workers.parallel.group import ParallelGroup
from workers.parallel.peer_memory import RowShape
from workers.parallel.pending_sum import PendingSum
from workers.parallel.process_group import make_group
from workers.parallel.rendezvous import LOOPBACK

DEVICE = torch.device("cuda", 0)
WIDTH = 1024
EPS = 1e-5
NUM_REPLAYS = 50
NUM_LAYERS = 150
MAX_ROWS = 4096
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(rank: int, size: int, folder: Path, *ports: int) -> None:
    """Run one rank."""
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for dtype, port in zip(DTYPES, ports[2:], strict=True):
        group = make_group(rank, size, device=DEVICE, timeout_s=60.0, rows=RowShape(WIDTH, dtype))
        group.max_begun_rows = MAX_ROWS
        group.join((LOOPBACK, port), host=LOOPBACK)
        assert group.one_shot is not None
        one_shot, group.one_shot = group.one_shot, None
        torch.manual_seed(rank)
        for num_rows in (1, 3, 64, 200, 3000):
            rows = torch.randn(num_rows, WIDTH, device=DEVICE).to(dtype)
            assert one_shot.takes(rows)
            results[f"{dtype} {num_rows} rows"] = (
                one_shot.reduce_rows(rows.clone()).cpu(),
                group.all_reduce(rows.clone()).cpu(),
            )
            results[f"{dtype} {num_rows} normed"] = tuple(
                tensor.cpu() for tensor in _normed(group, one_shot, rows)
            )
        results[f"{dtype} replayed"] = _replayed(one_shot, rank, dtype)
        results[f"{dtype} beside products"] = _beside_products(one_shot, rank, dtype)
        group.one_shot = one_shot
        if dtype is DTYPES[-1]:
            _aborts(one_shot, rank)
            group.leave()
            group.join((LOOPBACK, ports[0]), host=LOOPBACK)
            assert group.one_shot is one_shot
            ones = torch.ones(2, WIDTH, device=DEVICE)
            again = one_shot.reduce_rows(ones.clone()) + group.begin_all_reduce(ones).finish()
            results["joined again"] = (again.cpu(), torch.full((2, WIDTH), 2.0 * size))
            group.leave()
            with mock.patch.object(one_shot_all_reduce, "all_reduce_rows", side_effect=ValueError):
                group.join((LOOPBACK, ports[1]), host=LOOPBACK)
            assert group.one_shot is None
            summed = group.all_reduce(torch.ones_like(ones))
            results["not compiled"] = (summed.cpu(), torch.full((2, WIDTH), 1.0 * size))
        group.barrier()
        group.close()
    torch.save(results, folder / f"rank{rank}.pt")


def _normed(
    group: ParallelGroup, one_shot: OneShotAllReduce, rows: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the norms and streams of the one-shot kernel, then those of NCCL and `add_norm`."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    weight, bias = torch.randn(2, WIDTH, device=DEVICE, generator=generator).to(rows.dtype)
    stream = torch.randn(len(rows), WIDTH, device=DEVICE, generator=generator).to(rows.dtype)
    other = stream.clone()
    normed = one_shot.add_norm(stream, rows.clone(), weight, bias, EPS, is_centered=True)
    summed = group.all_reduce(rows.clone())
    expected = add_norm(other, summed, weight, bias, EPS, is_centered=True)
    return normed, stream, expected, other


def _replayed(
    one_shot: OneShotAllReduce, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum other rows in each replay of a graph; return the sums, and what they must be."""
    rows = torch.zeros(4, WIDTH, device=DEVICE, dtype=dtype)
    out = torch.zeros_like(rows)
    one_shot.reduce_rows(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(3):
            out.copy_(rows)
            one_shot.reduce_rows(out)
    sums = []
    for replay in range(NUM_REPLAYS):
        rows.fill_(replay + rank)
        if replay % 7 == rank:
            time.sleep(0.01)
        graph.replay()
        sums.append(out[3, :4].float().cpu())
    expected = torch.tensor([2.0 * replay + 1.0 for replay in range(NUM_REPLAYS)])
    return torch.stack(sums), expected.unsqueeze(1).expand(-1, 4)


def _beside_products(
    one_shot: OneShotAllReduce, rank: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum as the layers of a model do in halves; return how many numbers are wrong, and zeros."""
    chance = random.Random(5)
    weight = torch.randn(WIDTH, WIDTH, device=DEVICE).to(dtype)
    norm_weight = torch.ones(WIDTH, device=DEVICE, dtype=dtype)
    num_wrong = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    pending: list[tuple[PendingSum, torch.Tensor]] = []
    for index in range(4 * NUM_LAYERS):
        num_rows = chance.choice((1, 100, 1000, MAX_ROWS))
        parts = []
        for each in range(2):
            generator = torch.Generator(DEVICE).manual_seed(2 * index + each)
            shape = (num_rows, WIDTH)
            parts.append(torch.randn(shape, device=DEVICE, generator=generator).to(dtype))
        total = (parts[0].float() + parts[1].float()).to(dtype)
        begun = one_shot.begin_sum(parts[rank])
        assert begun is not None
        pending.append((begun, total))
        # What the rows were computed in is used again.
        del parts
        torch.mm(total, weight)
        if chance.random() < 0.05 and index % 2 == rank:
            time.sleep(0.005)
        if len(pending) == 2:
            oldest, expected = pending.pop(0)
            if index % 3:
                num_wrong += torch.ne(oldest.finish(), expected).sum()
                continue
            stream = torch.zeros_like(expected)
            normed = oldest.add_norm(stream, norm_weight, None, EPS, is_centered=False)
            assert normed is not None
            num_wrong += torch.ne(stream, expected).sum()
            right = add_norm(expected, None, norm_weight, None, EPS, is_centered=False)
            num_wrong += torch.ne(normed, right).sum()
    pending.pop()[0].finish()
    return num_wrong.cpu(), torch.zeros(1, dtype=torch.int64)


def _aborts(one_shot: OneShotAllReduce, rank: int) -> None:
    """Wait for the other ranks, which do not come, until another thread aborts."""
    if rank != 0:
        return
    threading.Timer(0.5, one_shot.abort).start()
    one_shot.reduce_rows(torch.ones(1, WIDTH, device=DEVICE))
    torch.cuda.synchronize()
    pending = one_shot.begin_sum(torch.ones(1, WIDTH, device=DEVICE))
    assert pending is not None
    pending.finish()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))

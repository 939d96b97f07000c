"""One rank on a GPU of its own: `one_shot_process RANK SIZE FOLDER PORT...`.

Sums rows with the one-shot kernel and with NCCL, and saves both as FOLDER/rankN.pt. Then it waits
for a rank that never comes, is aborted, and joins the group again.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention.kernels.triton.token_rows import add_norm
from workers.parallel.group_factory import make_group
from workers.parallel.one_shot import OneShotAllReduce, RowShape
from workers.parallel.rendezvous import LOOPBACK

if TYPE_CHECKING:
    from workers.parallel.group import ParallelGroup

DEVICE = torch.device("cuda", 0)
WIDTH = 1024
EPS = 1e-5
NUM_REPLAYS = 50
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main(rank: int, size: int, folder: Path, *ports: int) -> None:
    """Run one rank."""
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for dtype, port in zip(DTYPES, ports[1:], strict=True):
        group = make_group(rank, size, device=DEVICE, timeout_s=60.0, rows=RowShape(WIDTH, dtype))
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
        group.one_shot = one_shot
        if dtype is DTYPES[-1]:
            _aborts(one_shot, rank)
            group.leave()
            group.join((LOOPBACK, ports[0]), host=LOOPBACK)
            assert group.one_shot is one_shot
            again = one_shot.reduce_rows(torch.ones(2, WIDTH, device=DEVICE))
            results["joined again"] = (again.cpu(), torch.full((2, WIDTH), float(size)))
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
    normed = one_shot.add_norm(stream, rows.clone(), weight, bias, EPS, is_centred=True)
    summed = group.all_reduce(rows.clone())
    expected = add_norm(other, summed, weight, bias, EPS, is_centred=True)
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


def _aborts(one_shot: OneShotAllReduce, rank: int) -> None:
    """Wait for the other ranks, which do not come, until another thread aborts."""
    if rank != 0:
        return
    threading.Timer(0.5, one_shot.abort).start()
    one_shot.reduce_rows(torch.ones(1, WIDTH, device=DEVICE))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))

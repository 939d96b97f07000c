"""One rank of a group in a process of its own: `rank_process RANK SIZE ADDRESS FOLDER CASE...`.

Runs the checkpoints FOLDER/CASE and saves their logits, and the results of the collectives, as
FOLDER/rankN.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tests.workers.reference import CPU, loaded_model, run
from workers.parallel.open_group import open_group

if TYPE_CHECKING:
    from workers.parallel.group import ParallelGroup


def main(rank: int, size: int, address: Path, folder: Path, *cases: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    with open_group(rank, size, device=CPU, address=address, timeout_s=60.0) as group:
        logits = {name: run(loaded_model(folder / name, group), group) for name in cases}
        bfloat16 = run(loaded_model(folder / cases[0], group, "bfloat16"), group)
        results = {"logits": logits, "bfloat16": bfloat16, "collectives": _collectives(group)}
        torch.save(results, folder / f"rank{rank}.pt")
        group.barrier()


def _collectives(group: ParallelGroup) -> dict[str, torch.Tensor]:
    mine = torch.full((3, 2), float(group.rank + 1))
    return {
        "reduced": group.all_reduce(mine.clone()),
        "gathered": group.all_gather_last(mine),
        "gathered_strided": group.all_gather_last(mine.t()),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])

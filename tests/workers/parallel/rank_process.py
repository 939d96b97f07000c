"""One rank of a group in a process of its own: `rank_process RANK SIZE ADDRESS FOLDER CASE...`.

Runs the checkpoints FOLDER/CASE and saves their logits, and the results of the collectives, as
FOLDER/rankN.pt.
"""

import math
import sys
from pathlib import Path

import torch

from pagedray.sampling_params import SamplingParams
from tests.workers.parallel.joined_group import join_group
from tests.workers.reference import CPU, loaded_model, run
from tests.workers.reference_cases import EXPERT_PARALLEL_CASES
from tests.workers.sampling.sampler_rig import make_start
from workers.layers.sharded_logits import ShardedLogits
from workers.parallel.group import ParallelGroup
from workers.sampler import Sampler


def main(rank: int, size: int, address: Path, folder: Path, *cases: str) -> None:
    """Run one rank."""
    torch.set_num_threads(1)
    with join_group(rank, size, device=CPU, address=address, timeout_s=60.0) as group:
        logits = {name: run(loaded_model(folder / name, group), group) for name in cases}
        expert_parallel = {
            name: run(loaded_model(folder / name, group, is_expert_parallel=True), group)
            for name in cases
            if name in EXPERT_PARALLEL_CASES
        }
        bfloat16 = run(loaded_model(folder / cases[0], group, "bfloat16"), group)
        results = {
            "logits": logits,
            "expert_parallel": expert_parallel,
            "bfloat16": bfloat16,
            "collectives": _collectives(group),
            "sampled": _sampled(group),
        }
        torch.save(results, folder / f"rank{rank}.pt")
        group.barrier()


def _sampled(group: ParallelGroup) -> dict[str, torch.Tensor]:
    """Return tokens of logits that are whole, and of logits that are sharded.

    Every second row is greedy.
    """
    # 13 of them on each rank, and the last one is padding. Many logits are equal.
    vocab_size = 25
    whole = torch.randn(64, 26, generator=torch.Generator().manual_seed(0)).mul_(2).round_()
    whole[0, 20] = math.nan
    whole[1, 3] = math.inf
    whole[2] = -math.inf
    # Padding is never the most likely.
    whole[:, vocab_size] = 100.0
    sampler = Sampler(max_num_rows=64, vocab_size=vocab_size, device=CPU)
    for row in range(64):
        sampler.start(make_start(SamplingParams(temperature=row % 2), row=row, seed=row))
    part = whole[:, 13 * group.rank :][:, :13].contiguous()
    logits = ShardedLogits(part, first_id=13 * group.rank, vocab_size=vocab_size, group=group)
    gathered = logits.whole()
    rows, positions = list(range(64)), [3] * 64
    return {
        "expected": sampler.sample(whole[:, :vocab_size], rows, positions).token_ids,
        "of whole logits": sampler.sample(gathered, rows, positions).token_ids,
        "of sharded logits": sampler.sample_sharded(logits, rows, positions).token_ids,
        "of greedy rows": sampler.sample_sharded(logits, [0] * 64, positions).token_ids,
        "of random rows": sampler.sample_sharded(logits, [5] * 64, positions).token_ids,
    }


def _collectives(group: ParallelGroup) -> dict[str, torch.Tensor]:
    mine = torch.full((3, 2), float(group.rank + 1))
    return {
        "reduced": group.all_reduce(mine.clone()),
        "gathered": group.all_gather_last(mine),
        "gathered_strided": group.all_gather_last(mine.t()),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])

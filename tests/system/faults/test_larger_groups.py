"""Groups of more than two ranks survive the deaths of some."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.system.rank_group import kill_after_steps, open_group, tokens_of
from tests.system.rank_processes import serving_processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "num_ranks", "victims"), [(0, 3, [1]), (1, 4, [2]), (1, 4, [0, 3])]
)
def test_larger_group_keeps_the_ranks_that_live(
    tmp_path: Path, ray_cluster: None, case: int, num_ranks: int, victims: list[int]
) -> None:
    save_checkpoint(CASES[case], tmp_path)
    with open_group(tmp_path, num_ranks=num_ranks, enable_prefix_cache=False) as llm:
        undisturbed = tokens_of(llm)
        group = serving_processes()
        assert len(group) == num_ranks
        killed = [group[place] for place in victims]
        kill_after_steps(llm, 20, killed)
        assert tokens_of(llm) == undisturbed
        assert set(serving_processes()) & set(group) == set(group) - set(killed)
        assert len(serving_processes()) == num_ranks
        stats = llm.stats().scheduler
        assert stats.num_free_blocks == stats.num_blocks

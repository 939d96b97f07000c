"""Over how many ranks a model can be sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagedray.errors import StartupError
from tests.workers.models.families.llama_config import read_llama
from workers.models.families.registry import (
    check_parallel,
)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "part"),
    [
        (
            {},
            4,
            "6 attention heads cannot be sharded evenly over 4 ranks; use 1, 2, 3, 6",
        ),
        ({}, 2, "3 KV heads cannot be sharded over 2 ranks"),
        ({"intermediate_size": 95}, 3, "95 MLP columns (intermediate_size)"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_rejected(
    changes: dict[str, Any], num_ranks: int, part: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as caught:
        check_parallel(read_llama(tmp_path, **changes), num_ranks)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("is_expert_parallel", "part"),
    [
        (False, "21 columns of each expert cannot be sharded evenly over 2 ranks; use 1, 3, 7, 21"),
        (True, "7 experts cannot be sharded evenly over 2 ranks; use 1, 7."),
    ],
)
def test_experts_that_cannot_be_sharded_are_rejected(
    is_expert_parallel: bool, part: str, tmp_path: Path
) -> None:
    config = read_llama(
        tmp_path,
        architectures=["Qwen3MoeForCausalLM"],
        num_key_value_heads=2,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
    )
    with pytest.raises(StartupError) as caught:
        check_parallel(config.with_expert_parallel() if is_expert_parallel else config, 2)
    assert part in str(caught.value)


@pytest.mark.parametrize(("kv_heads", "num_ranks"), [(3, 1), (3, 3), (3, 6), (6, 2), (1, 6)])
def test_a_model_that_can_be_sharded_is_accepted(
    kv_heads: int, num_ranks: int, tmp_path: Path
) -> None:
    check_parallel(read_llama(tmp_path, num_key_value_heads=kv_heads), num_ranks)

"""A rank that is replaced beside others continues only with the weights that they have."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pagedray.errors import EngineError
from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.system.rank_group import open_group, tokens_of
from tests.system.rank_processes import serving_processes


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    save_checkpoint(CASES[0], tmp_path)
    return tmp_path / "model.safetensors"


def exchange(weights: Path, *, factor: float) -> None:
    """Put another file in the place of the weights, with the values of one tensor scaled."""
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.up_proj.weight"] *= factor
    other = weights.with_suffix(".new")
    save_file(tensors, other, metadata={"format": "pt"})
    os.utime(other, (1, 1))
    other.rename(weights)


@pytest.mark.slow
def test_a_group_never_mixes_two_versions_of_its_weights(weights: Path, ray_cluster: None) -> None:
    with open_group(weights.parent) as llm:
        tokens_of(llm)
        exchange(weights, factor=2.0)
        serving_processes()[-1].kill()
        with pytest.raises(EngineError, match=r"model\.safetensors .* rank 0 .* rank 1"):
            tokens_of(llm)


@pytest.mark.slow
def test_a_copy_of_the_weights_is_as_good_as_the_original(weights: Path, ray_cluster: None) -> None:
    with open_group(weights.parent) as llm:
        undisturbed = tokens_of(llm)
        exchange(weights, factor=1.0)
        serving_processes()[-1].kill()
        assert tokens_of(llm) == undisturbed


@pytest.mark.slow
def test_ranks_that_all_load_again_may_load_other_weights(weights: Path, ray_cluster: None) -> None:
    with open_group(weights.parent) as llm:
        before = tokens_of(llm)
        exchange(weights, factor=2.0)
        for rank in serving_processes():
            rank.kill()
        after = tokens_of(llm)
    with open_group(weights.parent) as llm:
        assert tokens_of(llm) == after != before

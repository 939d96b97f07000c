"""What the keys and values in a CPU pool are of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.config import EngineConfig
from tests.small_models.checkpoints import CASES, save_checkpoint
from workers.runner.persistent_pool import PoolOrigin

LAYOUT = (8, (2, 2, 4), torch.float32)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    save_checkpoint(CASES[0], tmp_path)
    return engine_config(tmp_path, EngineOptions(device="cpu"))


def origin(config: EngineConfig, *, layout: Sequence[object] = LAYOUT, rank: int = 0) -> bytes:
    return PoolOrigin(config, rank=rank).digest(layout)


def test_the_same_rank_of_the_same_model_has_the_same_origin(config: EngineConfig) -> None:
    again = engine_config(config.model.folder, EngineOptions(device="cpu"))
    assert origin(config) == origin(again)
    # What does not change the content may change.
    assert origin(config) == origin(replace(config, enforce_eager=True))


def test_anything_that_changes_keys_and_values_changes_it(config: EngineConfig) -> None:
    model = replace(config.model, rope=None)
    found = {
        origin(config),
        origin(config, rank=1),
        origin(config, layout=(9, *LAYOUT[1:])),
        origin(config, layout=(*LAYOUT[:2], torch.float16)),
        origin(replace(config, model=model)),
        origin(replace(config, load_format="dummy")),
        origin(replace(config, load_format="dummy", load_seed=1)),
    }
    (weights,) = config.model.folder.glob("*.safetensors")
    os.utime(weights, (1, 1))
    found.add(origin(config))
    assert len(found) == 8

"""Dummy weights, which are drawn without a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagedray.config import EngineConfig
from tests.workers.reference import run, save_checkpoint
from tests.workers.weights.small_checkpoint import CASE, UNTIED, decoder_of
from workers.layers.weight import WeightShard
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import DummyTensors, fill_shards, load_weights


@pytest.mark.parametrize("size", [2, 4])
def test_dummy_weights_do_not_depend_on_the_ranks(size: int, tmp_path: Path) -> None:
    save_checkpoint(UNTIED, tmp_path)
    config = read_model_config(tmp_path)
    whole = {shard.name: shard for shard in decoder_of(config).weight_shards()}
    fill_shards(list(whole.values()), DummyTensors(7))
    for rank in range(size):
        shards = list(decoder_of(config, rank, size).weight_shards())
        fill_shards(shards, DummyTensors(7))
        for shard in shards:
            assert torch.equal(shard.target, whole[shard.name].target[shard.part])


def test_dummy_weights_cross_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.weights.load_weights._CHUNK_ELEMENTS", 30)
    whole, part = torch.zeros(11, 7), torch.zeros(4, 5)
    DummyTensors(1).fill_shard(
        WeightShard(name="w", shape=(11, 7), part=(slice(None), slice(None)), target=whole)
    )
    DummyTensors(1).fill_shard(
        WeightShard(name="w", shape=(11, 7), part=(slice(3, 7), slice(2, 7)), target=part)
    )
    assert torch.equal(part, whole[3:7, 2:7])
    assert len(whole.unique()) == 77


def test_dummy_weights_need_no_files_and_depend_on_the_seed(tmp_path: Path) -> None:
    save_checkpoint(CASE, tmp_path)
    config = read_model_config(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    group = SoloGroup()

    def logits(seed: int) -> torch.Tensor:
        model = decoder_of(config)
        load_weights(model, EngineConfig(model=config, load_format="dummy", load_seed=seed))
        return run(model, group)

    assert torch.equal(logits(3), logits(3))
    assert not torch.equal(logits(3), logits(4))
    assert logits(3).isfinite().all()


@pytest.mark.parametrize(
    ("name", "weight"), [("gemma3-two-ropes", 0.0), ("bloom-6-heads", 1.0), ("mpt-12-heads", 1.0)]
)
def test_dummy_norms_change_no_scale(name: str, weight: float, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    shards = list(decoder_of(read_model_config(tmp_path)).weight_shards())
    fill_shards(shards, DummyTensors(7))
    weights = [
        shard.target for shard in shards if shard.name.endswith(".weight") and len(shard.part) == 1
    ]
    assert len(weights) >= 7
    assert all((target == weight).all() for target in weights)

"""Checkpoints with NaN or infinite weights are rejected by the name of the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError
from pagedray.model_config import Dtype
from tests.workers.lone_rank import LoneRank
from tests.workers.reference import CPU, save_checkpoint
from workers.layers.weight import WeightShard
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import Checkpoint
from workers.weights.load_weights import FiniteTensors, fill_shards, load_weights

TIED = "llama-3-heads-1-kv-tied-linear"
# The tensors of queries, keys and values are separate, fused in order, and fused head by head.
CASES = [TIED, "phi3-window", "bloom-6-heads"]


def _load(folder: Path, group: SoloGroup, dtype: Dtype | None = None) -> None:
    config = read_model_config(folder, dtype=dtype)
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))


def _change(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors[name].view(-1))
    save_file(tensors, path)


@pytest.mark.parametrize("case", CASES)
def test_one_nan_in_any_tensor_is_found(case: str, tmp_path: Path) -> None:
    save_checkpoint(case, tmp_path)
    path = tmp_path / "model.safetensors"
    healthy = load_file(path)
    for number, name in enumerate(healthy):
        tensors = {key: tensor.clone() for key, tensor in healthy.items()}
        values = tensors[name].view(-1)
        values[(0, values.numel() // 2, -1)[number % 3]] = math.nan
        save_file(tensors, path)
        with pytest.raises(CheckpointError) as caught:
            _load(tmp_path, SoloGroup())
        assert str(caught.value) == (
            f"{path}: tensor {name} has 1 value that is NaN or infinite; download or export the "
            "checkpoint again."
        )


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_kind_of_value_is_found_in_every_type(
    dtype: Dtype, value: float, tmp_path: Path
) -> None:
    save_checkpoint(TIED, tmp_path)
    _load(tmp_path, SoloGroup(), dtype)
    _change(tmp_path, "model.norm.weight", lambda tensor: tensor[3:5].fill_(value))
    with pytest.raises(
        CheckpointError, match=r"norm\.weight has 2 values that are NaN or infinite"
    ):
        _load(tmp_path, SoloGroup(), dtype)


def test_a_rank_finds_what_is_in_its_part(tmp_path: Path) -> None:
    save_checkpoint("llama-12-heads-4-kv-llama3", tmp_path)
    name = "model.layers.0.mlp.gate_proj.weight"
    _change(tmp_path, name, lambda tensor: tensor[-1:].fill_(math.nan))
    with pytest.raises(CheckpointError, match=f"tensor {name} has 1 value that is NaN"):
        _load(tmp_path, LoneRank(1, 2))


def test_values_beyond_the_range_of_the_dtype_are_named_as_such(tmp_path: Path) -> None:
    save_checkpoint(TIED, tmp_path)
    _change(tmp_path, "model.norm.weight", lambda tensor: tensor[:1].fill_(1e5))
    _load(tmp_path, SoloGroup(), "bfloat16")
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path, SoloGroup(), "float16")
    text = "has 1 value that is beyond the range of float16; use another --dtype."
    assert str(caught.value).endswith(text)


def test_large_values_are_accepted_although_their_sum_is_infinite(tmp_path: Path) -> None:
    save_checkpoint(TIED, tmp_path)
    name = "model.layers.0.mlp.gate_proj.weight"
    _change(tmp_path, name, lambda tensor: tensor.fill_(6e4))
    _load(tmp_path, SoloGroup(), "float16")
    _change(tmp_path, name, lambda tensor: tensor.fill_(3e38))
    _load(tmp_path, SoloGroup(), "float32")
    _change(tmp_path, name, lambda tensor: tensor[-1:].fill_(-math.inf))
    with pytest.raises(CheckpointError, match=f"tensor {name} has 1 value that is NaN or"):
        _load(tmp_path, SoloGroup(), "float32")


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "stored_dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_last_value_of_a_large_strided_part_is_found(
    stored_dtype: torch.dtype, target_dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    stored = torch.full((1500, 900), 0.5, dtype=stored_dtype)
    stored[-1, 599] = value
    # The value is in the second half; each is copied in several chunks.
    save_file({"a": stored}, tmp_path / "model.safetensors")
    found = []
    for first in (0, 450):
        shard = WeightShard(
            name="a",
            shape=(1500, 900),
            part=(slice(None), slice(first, first + 450)),
            # Neither its rows nor its columns are next to each other.
            target=torch.empty(3000, 900, dtype=target_dtype)[::2, ::2],
        )
        with Checkpoint(tmp_path) as checkpoint:
            tensors = FiniteTensors(checkpoint)
            fill_shards([shard], tensors)
            try:
                tensors.raise_if_not_finite()
            except CheckpointError:
                found.append(first)
        assert torch.equal(shard.target[:-1], torch.full((1499, 450), 0.5, dtype=target_dtype))
    assert found == [450]


def test_empty_parts_are_finite(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(0, 3), "b": torch.zeros(3, 4)}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        tensors = FiniteTensors(checkpoint)
        parts = {"a": ((0, 3), slice(None)), "b": ((3, 4), slice(4, 4))}
        shards = [
            WeightShard(
                name=name,
                shape=shape,
                part=(slice(None), columns),
                target=torch.empty(shape)[:, columns],
            )
            for name, (shape, columns) in parts.items()
        ]
        fill_shards(shards, tensors)
        tensors.raise_if_not_finite()

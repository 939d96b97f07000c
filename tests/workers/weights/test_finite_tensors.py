"""Checkpoints with NaN or infinite weights are refused by the name of the tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import Dtype, EngineConfig
from pagedray.errors import CheckpointError
from tests.workers.reference import CPU, save_checkpoint
from workers.models.decoder import Decoder
from workers.models.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import load_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

TIED = "llama-3-heads-1-kv-tied-linear"
# The tensors of queries, keys and values are separate, fused in order, and fused head by head.
CASES = [TIED, "phi3-window", "bloom-6-heads"]


class _Rank(SoloGroup):
    """The second of two ranks, which never communicates."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = 1, 2


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
        _load(tmp_path, _Rank())


def test_values_beyond_the_range_of_the_dtype_are_named_as_such(tmp_path: Path) -> None:
    save_checkpoint(TIED, tmp_path)
    _change(tmp_path, "model.norm.weight", lambda tensor: tensor[:1].fill_(1e5))
    _load(tmp_path, SoloGroup(), "bfloat16")
    with pytest.raises(CheckpointError) as caught:
        _load(tmp_path, SoloGroup(), "float16")
    text = "has 1 value that is beyond the range of float16; use another --dtype."
    assert str(caught.value).endswith(text)

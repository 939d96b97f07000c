"""The scales that a checkpoint has for keys and values in an fp8 cache."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig, KVCacheDtype
from pagedray.errors import CheckpointError
from tests.small_models.quantized_checkpoints import save_compressed, save_replaced, save_wide
from tests.workers.reference import CPU, run
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.checkpoint import with_cache_format
from workers.weights.load_weights import load_weights

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
FIRST = "model.layers.0.self_attn.k_scale"
FACTOR = 2.0**9
"""Values so much larger are beyond fp8 without a scale."""


def save(folder: Path, scales: dict[str, torch.Tensor]) -> None:
    """Write a Llama with large values, and these scales of its cache."""
    plain = folder / "plain"
    save_wide(plain)
    tensors = load_file(plain / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("v_proj.weight"):
            tensor.mul_(FACTOR)
        if name.endswith("o_proj.weight"):
            tensor.div_(FACTOR)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_compressed(plain, folder / "model", CHANNELS, ROWS, kv_cache_scheme=CACHE)
    path = folder / "model" / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(path).items()
        if not name.endswith(("k_scale", "v_scale"))
    }
    save_file(tensors | scales, path, metadata={"format": "pt"})


def scales_of(keys: float, values: float) -> dict[str, torch.Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([scale])
        for layer in range(3)
        for name, scale in (("k_scale", keys), ("v_scale", values))
    }


def logits(folder: Path, kv_cache_dtype: KVCacheDtype) -> torch.Tensor:
    config = EngineConfig(model=read_model_config(folder / "model", dtype="float32"))
    cache = replace(config.cache, kv_cache_dtype=kv_cache_dtype)
    config = with_cache_format(replace(config, cache=cache))
    group = SoloGroup()
    model = Decoder(config.model, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, config)
    return run(model, group, (6, 1))


def test_scales_of_the_checkpoint_are_applied(tmp_path: Path) -> None:
    errors = []
    for name, values in (("fitting", FACTOR / 64), ("one", 1.0)):
        save(tmp_path / name, scales_of(1.0, values))
        exact = logits(tmp_path / name, "auto")
        found = logits(tmp_path / name, "fp8_e4m3")
        errors.append(float((found - exact).norm() / exact.norm()))
    with_scales, without = errors
    # Numbers in fp8 have three bits behind the first one.
    assert with_scales < 0.1
    assert without > 0.4


SPELLINGS = {
    "names of layers": ("k_scale", "v_scale"),
    "one for both": ("kv_scale", "kv_scale"),
    "names of projections": ("k_proj.k_scale", "v_proj.v_scale"),
    "outputs of projections": ("k_proj.output_scale", "v_proj.output_scale"),
}


@pytest.mark.parametrize("shape", [(1,), ()])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_scales_of_autofp8_are_applied_in_every_spelling(
    spelling: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    save(tmp_path, scales_of(FACTOR / 64, FACTOR / 64))
    expected = logits(tmp_path, "fp8_e4m3")
    path = tmp_path / "model" / "model.safetensors"
    names = dict(zip(("k_scale", "v_scale"), SPELLINGS[spelling], strict=True))
    tensors = {}
    for name, tensor in load_file(path).items():
        attention, _, scale = name.rpartition(".")
        is_scale = scale in names
        tensors[f"{attention}.{names[scale]}" if is_scale else name] = (
            tensor.reshape(shape) if is_scale else tensor
        )
    save_file(tensors, path, metadata={"format": "pt"})
    assert torch.equal(logits(tmp_path, "fp8_e4m3"), expected)


def test_autofp8_with_a_static_scheme_has_scales_of_the_cache(tmp_path: Path) -> None:
    section = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
        "kv_cache_scheme": "static",
    }
    plain = tmp_path / "plain"
    save_wide(plain)
    save_replaced(plain, tmp_path / "model", as_autofp8, section)
    path = tmp_path / "model" / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(2.0) for layer in range(3)}
    save_file(load_file(path) | scales, path, metadata={"format": "pt"})
    exact, found = logits(tmp_path, "auto"), logits(tmp_path, "fp8_e4m3")
    assert 0 < (found - exact).norm() < 0.1 * exact.norm()
    save_file(load_file(path) | {"model.layers.0.kv_scale": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.0\.kv_scale"):
        logits(tmp_path, "auto")


def as_autofp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax() / 448.0
    return {
        f"{name}.weight": (weight / scale).to(torch.float8_e4m3fn),
        f"{name}.weight_scale": scale,
        f"{name}.input_scale": torch.tensor(1.0),
    }


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({FIRST: None}, f"tensor {FIRST} is missing"),
        ({FIRST: torch.tensor([0.0])}, f"tensor {FIRST} is 0.0, but a scale"),
        ({FIRST: torch.tensor([torch.nan])}, f"tensor {FIRST} is nan, but a scale"),
        ({FIRST: torch.ones(4)}, rf"tensor {FIRST} has shape \[4\], but a scale"),
    ],
)
def test_wrong_scales_are_named(
    changes: dict[str, torch.Tensor | None], part: str, tmp_path: Path
) -> None:
    scales = scales_of(1.0, 1.0) | changes
    save(tmp_path, {name: scale for name, scale in scales.items() if scale is not None})
    with pytest.raises(CheckpointError, match=part):
        logits(tmp_path, "fp8_e4m3")

"""Checkpoints of gpt-oss with experts in mxfp4, against transformers and the definition."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.utils.quantization_config import Mxfp4Config

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError, StartupError
from tests.small_models.mxfp4 import quantize_experts, value_of
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import CPU, loaded_model, run, token_ids
from workers.layers.expert_product import DequantizedExperts, Mxfp4Experts, product_class
from workers.layers.formats.mxfp4 import Mxfp4Matrix, dequantized_mxfp4
from workers.models.decoder import Decoder
from workers.models.families.registry import check_parallel, read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import load_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mxfp4")
    save(path, intermediate_size=96)
    return path


def save(path: Path, *, intermediate_size: int) -> None:
    """Write a random checkpoint."""
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        vocab_size=131,
        max_position_embeddings=64,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(3)
    GptOssForCausalLM(config).save_pretrained(path)
    quantize_experts(path)


def copied(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Copy config.json and return the tensors."""
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return load_file(folder / "model.safetensors")


def test_every_number_is_that_of_the_format() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.tensor([[127, 128, 126, 100, 150, 1, 0, 250]] * 2, dtype=torch.uint8)
    matrix = Mxfp4Matrix(blocks, scales.view(torch.float8_e8m0fnu))
    expected = [
        [
            value_of(code, int(scale))
            for block, scale in zip(row, row_scales, strict=True)
            for byte in block.tolist()
            for code in (byte & 15, byte >> 4)
        ]
        for row, row_scales in zip(blocks, scales, strict=True)
    ]
    actual = dequantized_mxfp4(matrix, torch.float32).double()
    assert torch.equal(actual, torch.tensor(expected, dtype=torch.float64))


def test_logits_equal_those_of_transformers(folder: Path) -> None:
    group = SoloGroup()
    logits = run(loaded_model(folder, group), group)
    torch.testing.assert_close(logits, dequantized_logits(folder), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_without_a_dtype_runs_with_the_kernels_for_mxfp4(
    folder: Path, tmp_path: Path
) -> None:
    tensors = copied(folder, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    tensors = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = read_model_config(tmp_path)
    assert config.dtype == "bfloat16"
    assert config.experts is not None
    dtype = getattr(torch, config.dtype)
    cuda = torch.device("cuda")
    assert product_class(config.experts, dtype=dtype, device=cuda) is Mxfp4Experts
    assert product_class(config.experts, dtype=dtype, device=CPU) is DequantizedExperts
    group = SoloGroup()
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))
    assert run(model, group).dtype == torch.bfloat16


def test_ranks_with_one_and_two_of_three_blocks_compute_the_same(folder: Path) -> None:
    expected = dequantized_logits(folder)
    for logits in on_two_ranks(lambda group: run(loaded_model(folder, group), group)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def dequantized_logits(folder: Path) -> torch.Tensor:
    """Return what transformers computes with the weights that the numbers stand for."""
    model = GptOssForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        quantization_config=Mxfp4Config(dequantize=True),
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids()[None]).logits[0]
    return logits


def test_a_scale_that_is_not_a_number_is_rejected(folder: Path, tmp_path: Path) -> None:
    tensors = copied(folder, tmp_path)
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name][2, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has 1 value that is NaN"):
        loaded_model(tmp_path, SoloGroup())


def test_blocks_of_another_dtype_are_rejected(folder: Path, tmp_path: Path) -> None:
    tensors = copied(folder, tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name].float()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} has dtype F32; supported dtypes are U8"):
        loaded_model(tmp_path, SoloGroup())


def test_ranks_without_a_block_are_rejected(folder: Path) -> None:
    config = read_model_config(folder)
    check_parallel(config, 2)
    message = r"3 blocks of 32 columns of each expert .* at most 3, or enable_expert_parallel"
    with pytest.raises(StartupError, match=message):
        check_parallel(config, 4)
    check_parallel(config.with_expert_parallel(), 4)


def test_dummy_weights_are_as_large_as_usual(folder: Path) -> None:
    config = read_model_config(folder, dtype="float32")
    group = SoloGroup()
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config, load_format="dummy"))
    assert math.isfinite(float(run(model, group).abs().max()))

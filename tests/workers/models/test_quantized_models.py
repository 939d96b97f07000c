"""Models with quantized weights, against transformers with what these weights stand for."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import StartupError
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import CPU, reference_logits, run, save_checkpoint
from workers.models.decoder import Decoder
from workers.models.families.registry import read_model_config
from workers.models.quantize_at_load import with_method
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from workers.parallel.group import ParallelGroup

# Projections that are separate, fused in order and by head, and with reordered columns.
FP8_CASES = ["llama-6-heads-2-kv-biases", "phi3-window", "bloom-6-heads", "glm4-four-norms"]
ROW_PARALLEL = ("o_proj.weight", "down_proj.weight")


def quantized_logits(folder: Path, group: ParallelGroup) -> torch.Tensor:
    """Return the logits of a rank of a model that is quantized when it is loaded."""
    config = with_method(read_model_config(folder, dtype="float32"), "fp8")
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))
    return run(model, group)


def save_rounded(folder: Path, rounded: Path, *, num_ranks: int) -> None:
    """Write the checkpoint with the matrices of its layers rounded to fp8."""
    shutil.copytree(folder, rounded)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or "embed" in name or "lm_head" in name:
            continue
        parts = tensor.double().chunk(num_ranks if name.endswith(ROW_PARALLEL) else 1, 1)
        scales = [part.abs().amax(1, keepdim=True) / 448 for part in parts]
        tensors[name] = torch.cat(
            [
                (part / scale).to(torch.float8_e4m3fn).double() * scale
                for part, scale in zip(parts, scales, strict=True)
            ],
            1,
        ).float()
    save_file(tensors, rounded / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", FP8_CASES)
def test_fp8_at_load_equals_rounded_weights(name: str, tmp_path: Path) -> None:
    folder, rounded = tmp_path / "plain", tmp_path / "rounded"
    save_checkpoint(name, folder)
    save_rounded(folder, rounded, num_ranks=1)
    expected = reference_logits(rounded)
    torch.testing.assert_close(
        quantized_logits(folder, SoloGroup()), expected, rtol=1e-4, atol=1e-4
    )
    # The plain weights give other logits.
    assert (reference_logits(folder) - expected).abs().max() > 1e-2


def test_two_ranks_equal_weights_that_each_rank_rounds(tmp_path: Path) -> None:
    folder, rounded = tmp_path / "plain", tmp_path / "rounded"
    save_checkpoint(FP8_CASES[0], folder)
    save_rounded(folder, rounded, num_ranks=2)
    expected = reference_logits(rounded)
    for logits in on_two_ranks(lambda group: quantized_logits(folder, group)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_other_formats_need_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint("llama-5-heads", tmp_path)
    with pytest.raises(StartupError, match=r"awq requires a checkpoint in this format, but .* fp8"):
        with_method(read_model_config(tmp_path), "awq")


def test_experts_are_refused(tmp_path: Path) -> None:
    save_checkpoint("qwen3_moe-renormalized", tmp_path)
    with pytest.raises(StartupError, match="fp8 is not supported for a model with experts"):
        with_method(read_model_config(tmp_path), "fp8")

"""Models with quantized weights, against transformers with what these weights stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import StartupError
from pagedray.model_config import Dtype
from pagedray.weight_format import Int4Format
from tests.small_models.int4_tensors import Int4Tensors
from tests.small_models.quantized_checkpoints import (
    save_compressed,
    save_fp8_blocks,
    save_replaced,
    save_wide,
)
from tests.workers.models.encoder_reference import save_bert
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import (
    CPU,
    loaded_model,
    reference_logits,
    run,
    save_checkpoint,
    token_ids,
)
from workers.models.config_json.quantization import with_method
from workers.models.decoder import Decoder
from workers.models.families.registry import check_parallel, read_model_config
from workers.parallel.group import ParallelGroup, SoloGroup
from workers.weights.load_weights import load_weights

# Projections that are separate, fused in order and by head, and with reordered columns.
FP8_CASES = ["llama-6-heads-2-kv-biases", "phi3-window", "bloom-6-heads", "glm4-four-norms"]
ROW_PARALLEL = ("o_proj", "down_proj")


def quantized_logits(folder: Path, group: ParallelGroup) -> torch.Tensor:
    """Return the logits of a rank of a model that is quantized when it is loaded."""
    config = with_method(read_model_config(folder, dtype="float32"), "fp8")
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config))
    return run(model, group)


def save_rounded(folder: Path, rounded: Path, *, num_ranks: int) -> None:
    """Write the checkpoint with the matrices of its layers rounded to fp8."""

    def replaced(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = weight.double().chunk(num_ranks if name.endswith(ROW_PARALLEL) else 1, 1)
        scales = [part.abs().amax(1, keepdim=True) / 448 for part in parts]
        found = [
            (part / scale).to(torch.float8_e4m3fn).double() * scale
            for part, scale in zip(parts, scales, strict=True)
        ]
        return {f"{name}.weight": torch.cat(found, 1).float()}

    save_replaced(folder, rounded, replaced)


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


CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
ROWS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
COMPRESSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "fp8-channels": (CHANNELS, ROWS),
    "fp8-tensors": (
        CHANNELS | {"strategy": "tensor"},
        ROWS | {"strategy": "tensor", "dynamic": False},
    ),
    "int4-symmetric": (INT4, None),
    "int4-asymmetric": (INT4 | {"symmetric": False}, None),
    "int8-channels": (INT8, None),
    "int8-tensors-and-inputs": (INT8 | {"strategy": "tensor"}, ROWS | {"type": "int"}),
    "int8-groups": (INT8 | {"strategy": "group", "group_size": 32}, None),
    "fp8-blocks": (
        CHANNELS | {"strategy": "block", "block_structure": [16, 32]},
        ROWS | {"strategy": "group", "group_size": 32},
    ),
}


def dequantized_logits(folder: Path) -> torch.Tensor:
    """Return what transformers computes with a checkpoint that it dequantizes."""
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=CompressedTensorsConfig(dequantize=True),
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids()[None]).logits[0]
    return logits


# Transformers warns that its own options win.
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    save_wide(folder)
    save_compressed(folder, compressed, *COMPRESSED[name])
    expected = dequantized_logits(compressed)
    group = SoloGroup()
    found = run(loaded_model(compressed, group), group)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for logits in on_two_ranks(lambda group: run(loaded_model(compressed, group), group)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


# Transformers warns that its own options win.
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", ["fp8-channels", "int4-symmetric", "int8-channels"])
def test_output_head_may_be_quantized(name: str, tmp_path: Path) -> None:
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    save_wide(folder, vocab_size=144)
    save_compressed(folder, compressed, *COMPRESSED[name], ignore=())
    check_parallel(read_model_config(compressed), 2)
    expected = dequantized_logits(compressed)
    group = SoloGroup()
    found = run(loaded_model(compressed, group), group)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for logits in on_two_ranks(lambda group: run(loaded_model(compressed, group), group)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_ranks_divide_a_quantized_head(tmp_path: Path) -> None:
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    save_wide(folder)
    save_compressed(folder, compressed, INT8, None, ignore=())
    check_parallel(read_model_config(compressed), 1)
    with pytest.raises(StartupError, match=r"lm_head is quantized and has 131 outputs, which 2"):
        check_parallel(read_model_config(compressed), 2)


def test_layers_that_stay_plain_are_divided_as_plain_ones(tmp_path: Path) -> None:
    folder, compressed = tmp_path / "plain", tmp_path / "compressed"
    save_wide(folder)
    save_compressed(folder, compressed, INT8, None, ignore=("lm_head", "re:.*o_proj"))
    check_parallel(read_model_config(compressed), 2)


@pytest.mark.parametrize("name", ["llama-6-heads-3-kv", "glm4-four-norms", "phi3-window"])
def test_blocks_of_fp8_equal_what_they_stand_for(name: str, tmp_path: Path) -> None:
    folder, quantized, dequantized = (tmp_path / part for part in ("plain", "fp8", "exact"))
    save_checkpoint(name, folder)
    # It neither divides the sizes nor the parts of fused tensors.
    save_fp8_blocks(folder, quantized, dequantized, 20)
    check_parallel(read_model_config(quantized), 1)
    group = SoloGroup()
    torch.testing.assert_close(
        run(loaded_model(quantized, group), group),
        reference_logits(dequantized),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(
    "name", ["qwen3_next-fused-projections", "qwen3_5_moe_text-biases", "mixtral-window"]
)
def test_blocks_of_experts_in_fp8_equal_what_they_stand_for(name: str, tmp_path: Path) -> None:
    folder, quantized, dequantized = (tmp_path / part for part in ("plain", "fp8", "exact"))
    save_checkpoint(name, folder)
    # The router, and the gate of shared experts, are plain in published checkpoints.
    kept = ["gate", "in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate"]
    save_fp8_blocks(folder, quantized, dequantized, 20, kept=kept)
    group = SoloGroup()
    torch.testing.assert_close(
        run(loaded_model(quantized, group), group),
        run(loaded_model(dequantized, group), group),
        rtol=1e-4,
        atol=1e-4,
    )


def test_ranks_have_whole_blocks_of_experts_in_fp8(tmp_path: Path) -> None:
    folder, quantized, dequantized = (tmp_path / part for part in ("plain", "fp8", "exact"))
    save_checkpoint("mixtral-window", folder)
    # An expert has two blocks and a part of the third; one rank has the first, one the others.
    kept = ["gate", "q_proj", "k_proj", "v_proj", "o_proj"]
    save_fp8_blocks(folder, quantized, dequantized, 32, kept=kept)
    config = read_model_config(quantized)
    check_parallel(config, 2)
    group = SoloGroup()
    expected = run(loaded_model(dequantized, group), group)
    for logits in on_two_ranks(lambda group: run(loaded_model(quantized, group), group)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(StartupError, match=r"3 blocks of 32 columns .* use at most 3"):
        check_parallel(config, 6)


INT4_METHODS: dict[str, tuple[Int4Format, dict[str, Any]]] = {
    "gptq": (
        Int4Format(packing="gptq", group_size=32, zero_offset=1),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False},
    ),
    "gptq-ordered": (
        Int4Format(packing="gptq", group_size=32, is_ordered=True),
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "desc_act": True,
            "checkpoint_format": "gptq_v2",
        },
    ),
    "gptq-8": (
        Int4Format(packing="gptq", num_bits=8, group_size=32, zero_offset=1),
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "desc_act": False, "sym": True},
    ),
    "gptq-8-ordered": (
        Int4Format(packing="gptq", num_bits=8, group_size=32, is_ordered=True, zero_offset=1),
        {
            "quant_method": "gptq",
            "bits": 8,
            "group_size": 32,
            "desc_act": True,
            "format": "gptq",
            "method": "gptq",
            "pack_dtype": "int32",
            "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:4.0.0"]},
        },
    ),
    "awq": (
        Int4Format(packing="awq", group_size=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
    ),
}


@pytest.mark.parametrize("name", INT4_METHODS)
def test_int4_equals_what_it_stands_for(name: str, tmp_path: Path) -> None:
    folder, quantized, exact = (tmp_path / part for part in ("plain", "int4", "exact"))
    format, section = INT4_METHODS[name]
    save_wide(folder)
    save_replaced(
        folder,
        quantized,
        lambda layer, weight: Int4Tensors.rounded(weight, format).stored(layer),
        section,
    )
    save_replaced(
        folder,
        exact,
        lambda layer, weight: {
            f"{layer}.weight": Int4Tensors.rounded(weight, format).exact.float()
        },
    )
    expected = reference_logits(exact)
    group = SoloGroup()
    found = run(loaded_model(quantized, group), group)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    # Torch's product rounds as transformers' in bfloat16 does.
    rounded = run(loaded_model(quantized, group, "bfloat16"), group)
    theirs = reference_logits(exact, torch.bfloat16)
    assert (rounded - expected).norm() < 1.5 * (theirs - expected).norm()
    if format.is_ordered:
        with pytest.raises(StartupError, match=r"stored in another order .* use one rank"):
            check_parallel(read_model_config(quantized), 2)
        return
    check_parallel(read_model_config(quantized), 2)
    for logits in on_two_ranks(lambda group: run(loaded_model(quantized, group), group)):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        *(section for _, section in INT4_METHODS.values()),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights_give_finite_logits(
    section: dict[str, Any], dtype: Dtype, tmp_path: Path
) -> None:
    save_wide(tmp_path / "plain")
    save_replaced(tmp_path / "plain", tmp_path / "dummy", lambda *_: {}, section)
    group = SoloGroup()
    config = read_model_config(tmp_path / "dummy", dtype=dtype)
    model = Decoder(config, group, backend=TorchSDPABackend, device=CPU)
    load_weights(model, EngineConfig(model=config, load_format="dummy"))
    assert bool(run(model, group).isfinite().all())


def test_ranks_that_would_cut_a_block_are_rejected(tmp_path: Path) -> None:
    save_wide(tmp_path / "plain")
    save_fp8_blocks(tmp_path / "plain", tmp_path / "fp8", tmp_path / "exact", 64)
    config = read_model_config(tmp_path / "fp8")
    check_parallel(config, 1)
    with pytest.raises(
        StartupError, match=r"0.self_attn.o_proj has 64 inputs in groups of 64, which 2 ranks"
    ):
        check_parallel(config, 2)


def test_ranks_that_would_cut_a_block_of_a_shared_mlp_are_rejected(tmp_path: Path) -> None:
    save_checkpoint("qwen3_next-fused-projections", tmp_path / "plain")
    kept = ["gate", "in_proj_ba", "q_proj", "k_proj", "v_proj", "o_proj", "shared_expert_gate"]
    save_fp8_blocks(tmp_path / "plain", tmp_path / "fp8", tmp_path / "exact", 20, kept=kept)
    message = r"0.mlp.shared_expert.down_proj has 26 inputs in groups of 20, which 2 ranks"
    with pytest.raises(StartupError, match=message):
        check_parallel(read_model_config(tmp_path / "fp8"), 2)


def test_other_formats_need_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint("llama-5-heads", tmp_path)
    with pytest.raises(StartupError, match=r"awq requires a checkpoint in this format, but .* fp8"):
        with_method(read_model_config(tmp_path), "awq")


def test_experts_are_rejected(tmp_path: Path) -> None:
    save_checkpoint("qwen3_moe-renormalized", tmp_path)
    with pytest.raises(StartupError, match="fp8 is not supported for a model with experts"):
        with_method(read_model_config(tmp_path), "fp8")


def test_encoders_are_rejected(tmp_path: Path) -> None:
    save_bert(tmp_path)
    with pytest.raises(StartupError, match="fp8 is not supported for an encoder"):
        with_method(read_model_config(tmp_path), "fp8")

"""The dtype of checkpoints, above all of those that do not name it in config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedray.errors import CheckpointError
from pagedray.model_config import ExpertsConfig
from tests.small_models.multimodal import transformers_class
from tests.workers.models.families.config_json import GEMMA3, SHAPE, read_config
from tests.workers.models.families.llama_config import LLAMA
from tests.workers.reference import save_checkpoint
from workers.layers.expert_product import (
    DequantizedExperts,
    GroupedExperts,
    LinearExperts,
    Mxfp4Experts,
    product_class,
)
from workers.models.families.registry import read_model_config

Tensors = dict[str, torch.Tensor]

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
BERT: dict[str, Any] = SHAPE | {"architectures": ["BertModel"]}
GEMMA3_PARTS: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": GEMMA3,
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
MXFP4 = {"quant_method": "mxfp4"}
GPT_OSS: dict[str, Any] = SHAPE | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 96,
    "num_key_value_heads": 3,
    "quantization_config": MXFP4,
}


def plain(dtype: torch.dtype) -> Tensors:
    return {"model.norm.weight": torch.ones(8, dtype=dtype)}


def fp8(scale: torch.dtype) -> Tensors:
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    return {"q_proj.weight": weight, "q_proj.weight_scale_inv": torch.ones(90, dtype=scale)}


PACKED = {"q_proj.qweight": torch.ones(99, dtype=torch.int32)}
BLOCKS = {"down_proj_blocks": torch.ones(99, dtype=torch.uint8)}


@pytest.mark.parametrize(
    ("base", "changes", "tensors", "dtype"),
    [
        (LLAMA, {}, plain(BF16), "bfloat16"),
        (LLAMA, {}, plain(F16), "float16"),
        (LLAMA, {}, plain(F32), "float32"),
        (LLAMA, {}, plain(F64), "float32"),
        (LLAMA, {"dtype": None, "torch_dtype": None}, plain(F16), "float16"),
        (LLAMA, {}, {"gate.bias": torch.ones(2), **plain(BF16)}, "bfloat16"),
        (LLAMA, {}, {}, "float32"),
        (LLAMA, {"torch_dtype": "torch.float16"}, plain(BF16), "float16"),
        (LLAMA, {"dtype": "torch.bfloat16"}, plain(F32), "bfloat16"),
        (LLAMA, {"dtype": "float32"}, plain(BF16), "float32"),
        (LLAMA, {"dtype": "float16", "torch_dtype": "float32"}, plain(BF16), "float16"),
        (BERT, {}, plain(F32), "float32"),
        (BERT, {}, plain(F16), "float16"),
        (LLAMA, {"quantization_config": GPTQ}, PACKED | plain(F16), "float16"),
        (LLAMA, {"quantization_config": GPTQ}, PACKED | plain(BF16), "bfloat16"),
        (LLAMA, {"quantization_config": GPTQ}, {}, "bfloat16"),
        (LLAMA, {"quantization_config": FP8}, fp8(F32) | plain(BF16), "bfloat16"),
        (LLAMA, {"quantization_config": FP8}, fp8(BF16) | plain(F16), "float16"),
        (LLAMA, {"quantization_config": FP8}, fp8(F32), "bfloat16"),
        (
            LLAMA,
            {"quantization_config": FP8, "torch_dtype": "float8_e4m3fn"},
            fp8(F32) | plain(F16),
            "float16",
        ),
        (GPT_OSS, {}, BLOCKS | plain(BF16), "bfloat16"),
        (GPT_OSS, {}, BLOCKS, "bfloat16"),
        (GPT_OSS, {}, {}, "bfloat16"),
        (GPT_OSS, {"quantization_config": ...}, plain(BF16), "bfloat16"),
        (GPT_OSS, {"dtype": "float32"}, BLOCKS | plain(BF16), "float32"),
        (GEMMA3_PARTS, {}, plain(BF16), "bfloat16"),
        (GEMMA3_PARTS, {}, {}, "float32"),
        (GEMMA3_PARTS, {"torch_dtype": "torch.float16"}, plain(BF16), "float16"),
        (GEMMA3_PARTS, {"text_config": GEMMA3 | {"dtype": "torch.float16"}}, {}, "float16"),
        (
            GEMMA3_PARTS,
            {"text_config": GEMMA3 | {"torch_dtype": "float32"}, "dtype": "bfloat16"},
            plain(F16),
            "bfloat16",
        ),
        (
            GEMMA3_PARTS,
            {"vision_config": {"dtype": "float32"}},
            plain(BF16),
            "bfloat16",
        ),
    ],
)
def test_the_dtype_is_the_declared_one_or_that_of_the_tensors(
    base: dict[str, Any], changes: dict[str, Any], tensors: Tensors, dtype: str, tmp_path: Path
) -> None:
    if tensors:
        save_file(tensors, tmp_path / "model.safetensors")
    assert read_config(tmp_path, base, **{"torch_dtype": ..., **changes}).dtype == dtype


def test_the_dtype_is_read_from_the_first_of_several_files(tmp_path: Path) -> None:
    names = [f"model-0000{index}-of-00002.safetensors" for index in (1, 2)]
    save_file(plain(BF16), tmp_path / names[0])
    index = {"weight_map": {"model.norm.weight": names[0], "lm_head.weight": names[1]}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_config(tmp_path, LLAMA, torch_dtype=...).dtype == "bfloat16"


def test_a_broken_file_of_tensors_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        read_config(tmp_path, LLAMA, torch_dtype=...)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize(
    "name", ["llama-5-heads", "gemma3-with-vision", "mixtral-window", "bloom-6-heads"]
)
def test_the_dtype_of_tensors_is_that_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    converted = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    save_file(converted, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    for section in (values, values.get("text_config", {}), values.get("vision_config", {})):
        section.pop("dtype", None)
    path.write_text(json.dumps(values))
    theirs = transformers_class(tmp_path).from_pretrained(tmp_path).dtype
    assert str(theirs) == f"torch.{read_model_config(tmp_path).dtype}"
    assert theirs == dtype


@pytest.mark.parametrize(
    ("is_mxfp4", "dtype", "device", "expected"),
    [
        (True, BF16, "cuda", Mxfp4Experts),
        (True, F32, "cuda", DequantizedExperts),
        (True, F16, "cuda", DequantizedExperts),
        (True, BF16, "cpu", DequantizedExperts),
        (False, BF16, "cuda", GroupedExperts),
        (False, BF16, "cpu", LinearExperts),
    ],
)
def test_kernels_of_experts_are_chosen_by_format_dtype_and_device(
    is_mxfp4: bool, dtype: torch.dtype, device: str, expected: type
) -> None:
    config = ExpertsConfig(
        num_experts=4, num_chosen=2, intermediate_size=64, is_renormalized=True, is_mxfp4=is_mxfp4
    )
    assert product_class(config, dtype=dtype, device=torch.device(device)) is expected

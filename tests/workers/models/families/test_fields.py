"""Fields of config.json: values, edits, dtypes and how tensors are divided."""

import copy
import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, GenerationConfig

from attention.cpu.torch_sdpa import TorchSDPABackend
from pagedray.config import EngineConfig
from pagedray.errors import CheckpointError, StartupError
from pagedray.model_config import ExpertsConfig
from tests.small_models.multimodal import TEXT_TYPES, transformers_class
from tests.workers.models.families.config_json import GEMMA3, SHAPE, read_config
from tests.workers.models.families.llama_config import LLAMA, read_llama
from tests.workers.reference import CPU, NUM_TOKENS, reference_logits, run, save_checkpoint
from tests.workers.reference_cases import CASES
from workers.layers.expert_product import (
    DequantizedExperts,
    GroupedExperts,
    LinearExperts,
    Mxfp4Experts,
    product_class,
)
from workers.models.config_json.config_file import IGNORED_FIELDS, ConfigFile, reason_to_ignore
from workers.models.config_json.family import Family
from workers.models.decoder import Decoder
from workers.models.families.registry import FAMILIES as ALL_FAMILIES
from workers.models.families.registry import check_parallel, read_model_config
from workers.parallel.group import SoloGroup
from workers.weights.load_weights import load_weights, with_stored_head

FAMILIES = {family.architecture: family for family in ALL_FAMILIES}
# What the registry reads for every family.
_COMMON = {"architectures", "model_type", "is_encoder_decoder", "dtype", "torch_dtype"}
_SHAPE = SHAPE | {"num_key_value_heads": 3}
# Those that other families lack.
_LACKS = {
    "BertModel": {"num_key_value_heads"},
    "RobertaModel": {"num_key_value_heads"},
    "BloomForCausalLM": {"num_key_value_heads", "intermediate_size", "max_position_embeddings"},
    "MptForCausalLM": {"num_key_value_heads", "intermediate_size", "max_position_embeddings"},
}
# Those that have no default.
_NEEDS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"mamba_n_heads": 2},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe"]},
    "Ministral3ForCausalLM": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "llama_4_scaling_beta": 0.1}
    },
}
REMOTE_TYPES = {"mimo"}
"""Types whose configuration is code of the checkpoint, not of transformers."""
SAMPLE = 1
"""Edits of each configuration that run each time; all of them are slow tests."""
# The section is not read; transformers does not find the tensors of some classes without a type,
# and does not apply MPT's maximum.
UNEDITED = {"vision_config", "model_type", "alibi_bias_max"}
WORDS = ("", "x", "relu", "gelu", "linear", "dynamic", "default", "mrope", "yarn")
# Fields of some families, with values that would change the result.
ADDED: dict[str, Any] = {
    "attention_bias": True,
    "attn_logit_softcapping": 3.0,
    "clip_qkv": 0.2,
    "decoder_sparse_step": 2,
    "final_logit_softcapping": 2.0,
    "head_dim": 16,
    "hidden_act": "gelu",
    "is_causal": False,
    "layer_rope_theta": [0.0, 30.0, 30.0],
    "layer_types": ["sliding_attention"] * 3,
    "llama_4_scaling_beta": 0.3,
    "logit_scale": 2.0,
    "max_window_layers": 1,
    "mlp_bias": True,
    "mlp_only_layers": [0],
    "mrope_section": [4, 1, 1],
    "no_rope_layers": [0, 1, 1],
    "norm_topk_prob": True,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 1,
    "original_max_position_embeddings": 11,
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 5,
    "rms_norm_eps": 0.1,
    "rope_local_base_freq": 5.0,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rope_theta": 77.0,
    "shared_intermediate_size": 12,
    "sliding_window": 4,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": True,
    "use_sliding_window": True,
}
FieldPath = tuple[str, ...]
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


def shape_of(architecture: str) -> dict[str, Any]:
    """Return the fields of a minimal configuration."""
    if text_types(FAMILIES[architecture]):
        return {"text_config": _SHAPE}
    lacks = _LACKS.get(architecture, set())
    shape = {field: value for field, value in _SHAPE.items() if field not in lacks}
    return shape | _NEEDS.get(architecture, {})


def text_types(family: Family) -> tuple[str, ...]:
    """Return the values of `model_type` of the text of a multimodal family."""
    return TEXT_TYPES.get(family.model_types[0], ())


def read_by(family: Family, values: dict[str, Any], folder: Path) -> ConfigFile:
    """Return a file that a family has read."""
    file = ConfigFile(folder / "config.json", values)
    family.read(file)
    return file


def unknown_fields(model_type: str, read: frozenset[str]) -> set[str]:
    """Return the fields of a class of transformers that are neither read nor may be ignored."""
    return {
        field.name
        for field in dataclasses.fields(CONFIG_MAPPING[model_type])
        if field.name not in read | _COMMON and reason_to_ignore(field.name) is None
    }


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_transformers_is_accounted_for(architecture: str, tmp_path: Path) -> None:
    family = FAMILIES[architecture]
    file = read_by(family, shape_of(architecture), tmp_path)
    for model_type in set(family.model_types) - REMOTE_TYPES:
        assert not unknown_fields(model_type, file.read_keys())


@pytest.mark.parametrize(
    ("architecture", "text_type"),
    [(name, text) for name, family in FAMILIES.items() for text in text_types(family)],
)
def test_every_field_of_the_text_of_a_multimodal_model_is_accounted_for(
    architecture: str, text_type: str, tmp_path: Path
) -> None:
    more = _NEEDS["Ministral3ForCausalLM"] if text_type == "ministral3" else {}
    values = {"text_config": _SHAPE | more | {"model_type": text_type}}
    file = read_by(FAMILIES[architecture], values, tmp_path)
    assert not unknown_fields(text_type, file.section("text_config").read_keys())


def test_defaults_of_generation_are_ignored() -> None:
    for name in GenerationConfig._get_default_generation_params():
        assert reason_to_ignore(name) is not None, name


@pytest.mark.parametrize("name", CASES)
def test_what_transformers_saves_is_accepted_with_any_ignored_field(
    name: str, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    expected = read_model_config(tmp_path)
    more = {field: 3.5 for field in IGNORED_FIELDS if field not in values}
    path.write_text(json.dumps(more | values))
    assert read_model_config(tmp_path) == expected


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("value", [True, 0.5, "x", [1], {"a": 1}])
def test_an_unknown_field_is_rejected_by_its_name(
    architecture: str, value: object, tmp_path: Path
) -> None:
    values = shape_of(architecture) | {"architectures": [architecture], "score_offset": value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"score_offset is not a field of \w+ that is"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("field", "shown"),
    [("a\nb", "'a\\\\nb' is"), ("x" * 200, "'" + "x" * 99 + " is"), ("", " is not")],
)
def test_any_unknown_field_is_shown_in_one_line(field: str, shown: str, tmp_path: Path) -> None:
    values = _SHAPE | {"architectures": ["LlamaForCausalLM"], field: 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=shown) as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [None, False, 0, "", [], {}])
def test_an_unknown_field_that_is_off_is_accepted(value: object, tmp_path: Path) -> None:
    values = _SHAPE | {"architectures": ["LlamaForCausalLM"], "score_offset": value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    read_model_config(tmp_path)


def edits_of(values: dict[str, Any]) -> list[tuple[FieldPath, object]]:
    """Return paths of fields and other values of them; `...` removes one."""
    places: list[FieldPath] = [(), ("text_config",)] if "text_config" in values else [()]
    return [
        *((path, other) for path, value in fields_of(values) for other in other_values(value)),
        *(((*place, field), value) for place in places for field, value in ADDED.items()),
    ]


def fields_of(values: dict[str, Any], place: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Yield the path of each field, also in sections, and its value."""
    for field, value in values.items():
        if field in UNEDITED:
            continue
        yield (*place, field), value
        if isinstance(value, dict):
            yield from fields_of(value, (*place, field))


def other_values(value: object) -> Iterator[object]:
    """Yield values that a field may be changed to."""
    yield from (..., None)
    match value:
        case bool():
            yield not value
        case int():
            yield from (value * 2, value + 1, 1, 0, float(value))
        case float():
            yield from (value * 2, value / 2, 1.0, 0.0)
        case str():
            yield from WORDS
        case list():
            yield from ([], value[::-1], value[:-1])
        case dict():
            yield {}
        case _:
            yield from (True, 3, 2.0, "x")


def edited(values: dict[str, Any], path: FieldPath, value: object) -> dict[str, Any]:
    """Return the values with one of them changed."""
    result = copy.deepcopy(values)
    place = result
    for section in path[:-1]:
        place = place[section]
    if value is ...:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    return result


def our_logits(folder: Path) -> torch.Tensor | None:
    """Return what we compute, or None if we reject the file."""
    try:
        model_config = read_model_config(folder, dtype="float32")
        if model_config.max_positions < NUM_TOKENS:
            return None
        config = with_stored_head(EngineConfig(model=model_config))
        model = Decoder(config.model, SoloGroup(), backend=TorchSDPABackend, device=CPU)
        load_weights(model, config)
    except CheckpointError:
        return None
    return run(model, SoloGroup())


def their_logits(folder: Path) -> torch.Tensor | None:
    """Return what transformers computes, or None if it fails."""
    try:
        return reference_logits(folder)
    # Each class fails in its own way.
    except Exception:
        return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_edits", [SAMPLE, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_edited_fields_are_rejected_or_read_as_transformers_reads_them(
    name: str, num_edits: int | None, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)
    path = tmp_path / "config.json"
    original = json.loads(path.read_text())
    wrong = []
    num_equal = 0
    edits = edits_of(original)
    for place, value in random.Random(name).sample(edits, num_edits or len(edits)):
        path.write_text(json.dumps(edited(original, place, value)))
        ours = our_logits(tmp_path)
        theirs = None if ours is None else their_logits(tmp_path)
        if ours is None or theirs is None:
            continue
        if torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            num_equal += 1
        else:
            wrong.append((place, value))
    assert not wrong
    # A few edits may all be rejected.
    assert num_edits is not None or num_equal > len(edits) / 10


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


@pytest.mark.parametrize(
    ("changes", "num_ranks", "part"),
    [
        (
            {},
            4,
            "6 attention heads cannot be sharded evenly over 4 ranks; use 1, 2, 3, 6",
        ),
        ({}, 2, "3 KV heads cannot be sharded over 2 ranks"),
        ({"intermediate_size": 95}, 3, "95 MLP columns (intermediate_size)"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_rejected(
    changes: dict[str, Any], num_ranks: int, part: str, tmp_path: Path
) -> None:
    with pytest.raises(StartupError) as caught:
        check_parallel(read_llama(tmp_path, **changes), num_ranks)
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("is_expert_parallel", "part"),
    [
        (False, "21 columns of each expert cannot be sharded evenly over 2 ranks; use 1, 3, 7, 21"),
        (True, "7 experts cannot be sharded evenly over 2 ranks; use 1, 7."),
    ],
)
def test_experts_that_cannot_be_sharded_are_rejected(
    is_expert_parallel: bool, part: str, tmp_path: Path
) -> None:
    config = read_llama(
        tmp_path,
        architectures=["Qwen3MoeForCausalLM"],
        num_key_value_heads=2,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
    )
    with pytest.raises(StartupError) as caught:
        check_parallel(config.with_expert_parallel() if is_expert_parallel else config, 2)
    assert part in str(caught.value)


@pytest.mark.parametrize(("kv_heads", "num_ranks"), [(3, 1), (3, 3), (3, 6), (6, 2), (1, 6)])
def test_a_model_that_can_be_sharded_is_accepted(
    kv_heads: int, num_ranks: int, tmp_path: Path
) -> None:
    check_parallel(read_llama(tmp_path, num_key_value_heads=kv_heads), num_ranks)

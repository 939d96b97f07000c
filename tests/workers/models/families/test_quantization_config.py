"""Sections `quantization_config`: what is read of them, and what is rejected by name."""

from pathlib import Path
from typing import Any

import pytest

from pagedray.errors import CheckpointError
from pagedray.weight_format import Fp8Format, Int4Format, Int8Format, Quantization
from tests.workers.models.families.config_json import SHAPE, read_config

LLAMA = SHAPE | {"architectures": ["LlamaForCausalLM"]}
QWEN_FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
WEIGHTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
    "observer": "minmax",
}
INPUTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}
GROUP: dict[str, Any] = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": GROUP},
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quantization_status": "compressed",
    "version": "0.20.0",
}


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
NO_INPUTS = {"input_activations": None}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}


def quantization_of(folder: Path, section: dict[str, Any], **more: Any) -> Quantization:
    """Return what is read of a section."""
    found = read_config(folder, LLAMA, **more, quantization_config=section).quantization
    assert found is not None
    return found


def with_group(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | changes}}


def test_blocks_are_read(tmp_path: Path) -> None:
    found = quantization_of(tmp_path, QWEN_FP8, torch_dtype="float8_e4m3fn")
    assert found.method == "fp8"
    assert found.format_of(["model.layers.0.mlp.down_proj"]) == Fp8Format(
        scales="block", block=(128, 128), scale_name="weight_scale_inv"
    )


def test_scales_of_tensors_and_inputs_are_read(tmp_path: Path) -> None:
    section = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    found = quantization_of(tmp_path, section)
    assert found.format_of(["a"]) == Fp8Format(scales="tensor", has_input_scale=True)


@pytest.mark.parametrize(
    ("word", "ignored", "kept"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        ("o_proj", "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.q_proj"),
        ("model.layers.*.mlp", "model.layers.7.mlp.up_proj", "model.layers.7.self_attn.o_proj"),
    ],
)
def test_layers_that_are_not_converted_are_plain(
    word: str, ignored: str, kept: str, tmp_path: Path
) -> None:
    found = quantization_of(tmp_path, QWEN_FP8 | {"modules_to_not_convert": ["lm_head", word]})
    assert found.format_of([ignored]) is None
    assert found.format_of([kept]) is not None


@pytest.mark.parametrize(
    ("word", "ignored", "kept"),
    [
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj"),
        (r"re:.*self_attn\..*", "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_ignored_layers_are_plain(word: str, ignored: str, kept: str, tmp_path: Path) -> None:
    found = quantization_of(tmp_path, COMPRESSED | {"ignore": ["lm_head", word]})
    assert found.format_of([ignored]) is None
    assert found.format_of([kept]) == Fp8Format(scales="channel")


def test_groups_have_their_own_formats(tmp_path: Path) -> None:
    tensors = GROUP | {
        "targets": ["re:.*down_proj"],
        "weights": WEIGHTS | {"strategy": "tensor"},
    }
    section = COMPRESSED | {"config_groups": {"a": tensors, "b": GROUP}}
    found = quantization_of(tmp_path, section)
    formats = [found.format_of([f"model.layers.0.mlp.{name}_proj"]) for name in ("down", "up")]
    assert formats == [Fp8Format(scales="tensor"), Fp8Format(scales="channel")]


def test_stored_names_of_multimodal_models_are_meant_too(tmp_path: Path) -> None:
    section = COMPRESSED | {"ignore": ["lm_head", "re:model.language_model.layers.0.*"]}
    model: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": SHAPE | {"num_key_value_heads": 3},
    }
    found = read_config(tmp_path, model, quantization_config=section).quantization
    assert found is not None
    assert found.format_of(["model.layers.0.mlp.up_proj"]) is None
    assert found.format_of(["model.layers.1.mlp.up_proj"]) is not None


def test_layers_of_one_product_have_one_format(tmp_path: Path) -> None:
    found = quantization_of(tmp_path, COMPRESSED | {"ignore": ["re:.*q_proj"]})
    with pytest.raises(CheckpointError, match=r"a\.q_proj and a\.k_proj in different formats"):
        found.format_of(["a.q_proj", "a.k_proj"])


@pytest.mark.parametrize(
    ("section", "format"),
    [
        (
            with_group(weights=WEIGHTS | INT4, **NO_INPUTS),
            Int4Format(packing="compressed-tensors", group_size=128, has_zeros=False),
        ),
        (
            with_group(
                weights=WEIGHTS | {"type": "int", "num_bits": 4, "symmetric": False}, **NO_INPUTS
            ),
            Int4Format(packing="compressed-tensors", group_size=None),
        ),
        (
            with_group(weights=WEIGHTS | {"type": "int"}, format="int-quantized", **NO_INPUTS),
            Int8Format(),
        ),
        (
            with_group(
                weights=WEIGHTS | INT4 | {"num_bits": 8},
                input_activations=INPUTS | {"type": "int", "observer": "minmax"},
                format="pack-quantized",
            ),
            Int8Format(scales="group", group_size=128, is_packed=True),
        ),
        (GPTQ, Int4Format(packing="gptq", group_size=128, zero_offset=1)),
        (
            GPTQ | {"desc_act": True, "group_size": -1, "checkpoint_format": "gptq_v2"},
            Int4Format(packing="gptq", group_size=None, is_ordered=True),
        ),
        (
            {key: GPTQ[key] for key in GPTQ if key != "desc_act"},
            Int4Format(packing="gptq", group_size=128, zero_offset=1),
        ),
        (AWQ, Int4Format(packing="awq", group_size=128)),
        (AWQ | {"do_fuse": False, "backend": "auto"}, Int4Format(packing="awq", group_size=128)),
    ],
)
def test_integers_are_read(
    section: dict[str, Any], format: Int4Format | Int8Format, tmp_path: Path
) -> None:
    found = quantization_of(tmp_path, section)
    assert found.method == section["quant_method"]
    assert found.format_of(["model.layers.0.mlp.up_proj"]) == format


def test_scales_of_the_cache_are_announced(tmp_path: Path) -> None:
    assert not quantization_of(tmp_path, COMPRESSED).has_cache_scales
    assert quantization_of(tmp_path, COMPRESSED | {"kv_cache_scheme": CACHE}).has_cache_scales
    static = {"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static"}
    assert quantization_of(tmp_path, static).has_cache_scales
    assert not quantization_of(tmp_path, static | {"kv_cache_scheme": None}).has_cache_scales


def test_output_head_has_a_format_if_the_checkpoint_says_so(tmp_path: Path) -> None:
    for section, has_head in ((GPTQ, False), (GPTQ | {"lm_head": True}, True), (COMPRESSED, True)):
        assert quantization_of(tmp_path, section).has_head == has_head
    assert quantization_of(tmp_path, COMPRESSED).format_of(["lm_head"]) is None
    everything = quantization_of(tmp_path, COMPRESSED | {"ignore": []})
    assert everything.format_of(["lm_head"]) == Fp8Format()


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"bits": 4}, "quantization_config.quant_method is missing"),
        ({"quant_method": "quip"}, "quant_method must be one of awq, compressed-tensors, fp8"),
        (QWEN_FP8 | {"fmt": "e5m2"}, 'fmt must be one of e4m3, float8_e4m3fn, not "e5m2"'),
        (QWEN_FP8 | {"activation_scheme": "static"}, "activation_scheme must be dynamic"),
        (QWEN_FP8 | {"weight_block_size": [128]}, "weight_block_size must be a list of two"),
        (QWEN_FP8 | {"weight_block_size": [0, 128]}, "weight_block_size must be a list of two"),
        (QWEN_FP8 | {"modules_to_not_convert": ["("]}, "modules_to_not_convert has '(', which is"),
        (QWEN_FP8 | {"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt is not a field"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.type is missing"),
        (
            COMPRESSED | {"kv_cache_scheme": CACHE | {"strategy": "attn_head"}},
            "kv_cache_scheme.strategy must be one of tensor",
        ),
        (
            COMPRESSED | {"kv_cache_scheme": CACHE | {"dynamic": True}},
            "kv_cache_scheme.dynamic must be false",
        ),
        (
            COMPRESSED | {"kv_cache_scheme": CACHE | {"num_bits": 9}},
            "kv_cache_scheme.num_bits must be an integer from 8 to 8, not 9",
        ),
        (COMPRESSED | {"quantization_status": "frozen"}, "quantization_status must be one of"),
        (COMPRESSED | {"sparsity_config": {"format": "24"}}, "sparsity_config.format must be"),
        (COMPRESSED | {"transform_config": {"x": 1}}, "transform_config is not a field"),
        (COMPRESSED | {"config_groups": {}}, "config_groups must name the targets"),
        (COMPRESSED | {"ignore": ["re:("]}, "ignore has 're:('"),
        (with_group(weights=WEIGHTS | {"num_bits": 6}), "weights.num_bits must be an integer"),
        (
            with_group(weights=WEIGHTS | {"type": "int", "num_bits": 3}),
            "weights.num_bits must be an integer from 4",
        ),
        (with_group(weights=WEIGHTS | {"num_bits": 9}), "weights.num_bits must be an integer"),
        (
            with_group(weights=WEIGHTS | INT4 | {"num_bits": 5}, **NO_INPUTS),
            "weights.num_bits must be an integer from 4 to 4, not 5",
        ),
        (with_group(weights=WEIGHTS | {"dynamic": True}), "weights.dynamic must be false"),
        (with_group(weights=WEIGHTS | INT4), "input_activations must be null"),
        (
            with_group(weights=WEIGHTS | INT4 | {"group_size": 48}, **NO_INPUTS),
            "group_size must be",
        ),
        (
            with_group(weights=WEIGHTS | INT4 | {"actorder": "group"}, **NO_INPUTS),
            "actorder must be one of weight, static",
        ),
        (
            with_group(
                weights=WEIGHTS | {"type": "int", "actorder": "group"},
                format="int-quantized",
                **NO_INPUTS,
            ),
            "actorder must be one of weight, static",
        ),
        (
            with_group(weights=WEIGHTS | {"type": "int"}, **NO_INPUTS),
            'format must be one of int-quantized, pack-quantized, not "float-quantized"',
        ),
        (
            with_group(
                weights=WEIGHTS | {"type": "int"},
                input_activations=INPUTS | {"type": "int", "dynamic": False},
                format="int-quantized",
            ),
            "input_activations.dynamic must be true",
        ),
        (
            with_group(
                weights=WEIGHTS | {"type": "int"},
                input_activations=INPUTS | {"type": "int", "num_bits": 9},
                format="int-quantized",
            ),
            "input_activations.num_bits must be an integer from 8 to 8, not 9",
        ),
        (GPTQ | {"bits": 3}, "quantization_config.bits must be an integer from 4 to 8, not 3"),
        (
            {"quant_method": "fp8", "kv_cache_scheme": "dynamic"},
            "quantization_config.kv_cache_scheme must be one of static",
        ),
        (GPTQ | {"bits": 6}, "quantization_config.bits must be 4 or 8, not 6"),
        (GPTQ | {"bits": None}, "quantization_config.bits is missing"),
        (GPTQ | {"format": "marlin"}, "format must be one of gptq, gptq_v2"),
        (GPTQ | {"method": "qqq"}, "method must be one of gptq"),
        (AWQ | {"format": "gemv"}, "format must be one of gemm"),
        (GPTQ | {"group_size": 100}, "group_size must be one of -1, 32, 64, 128, 256, not 100"),
        (GPTQ | {"lm_head": 1}, "lm_head must be"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be one of gptq, gptq_v2"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "quantization_config.dynamic is not a field"),
        (AWQ | {"version": "gemv"}, 'version must be one of gemm, GEMM, not "gemv"'),
        (AWQ | {"zero_point": False}, "zero_point must be true"),
        (AWQ | {"bits": 8}, "bits must be an integer from 4 to 4"),
        (with_group(weights=WEIGHTS | {"symmetric": False}), "weights.symmetric must be true"),
        (with_group(weights=WEIGHTS | {"strategy": "group"}), "weights.strategy must be one of"),
        (with_group(input_activations=None), "input_activations.type is missing"),
        (with_group(input_activations=INPUTS | {"num_bits": 4}), "input_activations.num_bits must"),
        (with_group(input_activations=INPUTS | {"num_bits": 9}), "input_activations.num_bits must"),
        (with_group(input_activations=INPUTS | {"strategy": "tensor"}), "strategy must be one of"),
        (with_group(output_activations=INPUTS), "output_activations is not a field"),
    ],
)
def test_what_is_not_supported_is_named(section: dict[str, Any], part: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        quantization_of(tmp_path, section)
    message = str(caught.value)
    assert part in message
    assert message.startswith(f"{tmp_path / 'config.json'}: quantization_config.")
    assert "\n" not in message


def test_experts_and_encoders_are_rejected(tmp_path: Path) -> None:
    experts = SHAPE | {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 3}
    encoder = {key: SHAPE[key] for key in SHAPE} | {"architectures": ["BertModel"]}
    cases = ((experts, GPTQ, "a model with experts"), (encoder, QWEN_FP8, "an encoder"))
    for values, section, what in cases:
        with pytest.raises(CheckpointError, match=f"is not supported for {what}"):
            read_config(tmp_path, values, quantization_config=section)

"""gpt-oss: experts with biases and clamped gates, attention sinks, windows on every other layer."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagedray.model_config import ClampedGate, ExpertsConfig, ModelConfig, TensorNames
from pagedray.weight_format import MXFP4_BLOCK_SIZE
from workers.models.config_json.family import Family, base_config, experts_of, windows_by_layer_type
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GPT_OSS"]

_MAX_NUMBER = 1e6
_NAMES = TensorNames(
    router="mlp.router",
    expert_input=("mlp.experts.gate_up_proj",),
    expert_input_bias="mlp.experts.gate_up_proj_bias",
    expert_output="mlp.experts.down_proj",
    expert_output_bias="mlp.experts.down_proj_bias",
    is_expert_input_interleaved=True,
    are_experts_transposed=True,
)
# The default of transformers for a missing section.
_DEFAULT_ROPE: Mapping[str, object] = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(file, default_num_kv_heads=8, default_head_size=64, default_norm_eps=1e-5)
    has_attention_bias = file.flag("attention_bias", True)
    # Names that the authors gave to fields which have other names here.
    file.note_read("experts_per_token", "initial_context_length")
    if not file.value("rope_scaling") and "rope_parameters" not in file:
        file.section("rope_parameters", _DEFAULT_ROPE)
    return replace(
        with_rope(config, file, default_theta=150000.0),
        names=_NAMES,
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_sinks=True,
        sliding_windows=windows_by_layer_type(
            file,
            default_window=128,
            has_window_by_default=[layer % 2 == 0 for layer in range(config.num_layers)],
        ),
        experts=_experts(file, config),
    )


def _experts(file: ConfigFile, config: ModelConfig) -> ExpertsConfig:
    experts = experts_of(
        file,
        default_num=128,
        default_num_chosen=4,
        intermediate_size=config.intermediate_size,
        # It takes the softmax over the chosen experts, which is the same.
        is_renormalized=True,
    )
    gate = ClampedGate(
        alpha=file.number("swiglu_alpha", 1.702, most=_MAX_NUMBER),
        limit=file.number("swiglu_limit", 7.0, most=_MAX_NUMBER),
    )
    return replace(experts, gate=gate, has_bias=True, is_mxfp4=_has_mxfp4(file, config))


def _has_mxfp4(file: ConfigFile, config: ModelConfig) -> bool:
    """Return whether the experts, and they alone, are stored in mxfp4."""
    if not file.value("quantization_config"):
        return False
    section = file.section("quantization_config")
    section.choice("quant_method", ("mxfp4",))
    section.note_read("dequantize")
    for module in section.words("modules_to_not_convert"):
        if "experts" in module:
            raise section.rejection(
                "modules_to_not_convert", "must not name experts, which are all in mxfp4"
            )
    for key, size in (
        ("hidden_size", config.hidden_size),
        ("intermediate_size", config.intermediate_size),
    ):
        if size % MXFP4_BLOCK_SIZE:
            raise file.rejection(
                key, f"must be a multiple of {MXFP4_BLOCK_SIZE} in mxfp4, not {size}"
            )
    return True


GPT_OSS = Family(
    architecture="GptOssForCausalLM",
    model_types=("gpt_oss",),
    reader=_read,
    reads_quantization=True,
)

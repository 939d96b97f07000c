"""GLM-4: rope of adjacent pairs on half of each head, gate and up projection fused.

`Glm4ForCausalLM` (0414) adds norms after attention and MLP to `GlmForCausalLM`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_THETA
from workers.models.config_json.rope_section import rope_of, rope_section, rotary_size

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GLM", "GLM4"]

_NORM_EPS = 1.5625e-7
_NAMES = TensorNames(mlp_input=("mlp.gate_up_proj",))
_NAMES_OF_FOUR_NORMS = replace(
    _NAMES,
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)


def _read(file: ConfigFile, architecture: str, names: TensorNames) -> ModelConfig:
    config = base_config(
        file,
        architecture,
        default_num_kv_heads=2,
        default_head_size=128,
        default_norm_eps=_NORM_EPS,
    )
    section = rope_section(file)
    theta = file.number("rope_theta", 10000.0, most=MAX_THETA)
    rope = rope_of(section, file, default_theta=theta)
    size = rotary_size(file, section, config.head_size, default_factor=0.5)
    return replace(
        config,
        names=names,
        rope=replace(rope, rotary_size=size, is_interleaved=True),
        has_qkv_bias=file.flag("attention_bias", True),
    )


def _read_glm(file: ConfigFile) -> ModelConfig:
    return _read(file, GLM.architecture, _NAMES)


def _read_glm4(file: ConfigFile) -> ModelConfig:
    return _read(file, GLM4.architecture, _NAMES_OF_FOUR_NORMS)


GLM = Family(architecture="GlmForCausalLM", model_types=("glm",), read=_read_glm)
GLM4 = Family(architecture="Glm4ForCausalLM", model_types=("glm4",), read=_read_glm4)

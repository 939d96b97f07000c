"""Llama, and families that differ from Llama in little."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, MtpLayer, TensorNames, TextTensors
from workers.models.config_json.family import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    MAX_THETA,
    STACKED_NAMES,
    Family,
    base_config,
    has_window_by_layer,
    scored_experts,
    windows_by_layer_type,
)
from workers.models.config_json.rope_section import (
    read_longrope,
    rope_of,
    rope_section,
    rotary_size,
    with_rope,
)

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = [
    "COHERE2",
    "ERNIE4_5",
    "GLM",
    "GLM4",
    "GLM4_MOE",
    "LLAMA",
    "PHI3",
    "SEED_OSS",
    "SMOLLM3",
    "STARCODER2",
]

_THETA_SMOLLM3 = 2e6
_THETA_ERNIE4_5 = 5e5
_NAMES_PHI3 = TensorNames(qkv=("self_attn.qkv_proj",), mlp_input=("mlp.gate_up_proj",))
_NAMES_STARCODER2 = TensorNames(mlp_input=("mlp.c_fc",), mlp_output="mlp.c_proj")
_NORM_EPS_GLM4 = 1.5625e-7
_NAMES_GLM4 = TensorNames(mlp_input=("mlp.gate_up_proj",))
_NAMES_OF_FOUR_NORMS_GLM4 = replace(
    _NAMES_GLM4, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm"
)

_NAMES_GLM4_MOE = TensorNames(
    router_bias="mlp.gate.e_score_correction_bias",
    shared_input=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_output="mlp.shared_experts.down_proj",
)
_STACKED_NAMES_GLM4_MOE = replace(
    _NAMES_GLM4_MOE,
    expert_input=STACKED_NAMES.expert_input,
    expert_output=STACKED_NAMES.expert_output,
)

_MAX_SCALE_COHERE2 = 1e6
_NAMES_COHERE2 = TensorNames(mlp_norm=None)
# Options that published checkpoints name, of which transformers has only these values.
_FIXED_COHERE2 = {
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def _read_llama(file: ConfigFile) -> ModelConfig:
    """Llama; `attention_bias` adds biases to all four projections, `mlp_bias` to the MLP."""
    has_attention_bias = file.flag("attention_bias", False)
    # Falcon3 also names the activation and the gate of its MLP together.
    file.choice("activation", ("swiglu", "silu"), "swiglu")
    return replace(
        with_rope(base_config(file), file),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=file.flag("mlp_bias", False),
    )


LLAMA = Family(architecture="LlamaForCausalLM", model_types=("llama",), reader=_read_llama)


def _read_seed_oss(file: ConfigFile) -> ModelConfig:
    """Seed-OSS: Llama with biases on queries, keys and values, and a head size of its own."""
    config = base_config(file, default_num_kv_heads=8, default_head_size=128)
    return replace(
        with_rope(config, file),
        has_qkv_bias=file.flag("attention_bias", True),
        has_output_bias=file.flag("attention_out_bias", False),
        has_mlp_bias=file.flag("mlp_bias", False),
    )


SEED_OSS = Family(
    architecture="SeedOssForCausalLM", model_types=("seed_oss",), reader=_read_seed_oss
)


def _read_smollm3(file: ConfigFile) -> ModelConfig:
    """SmolLM3: Llama without rope on every fourth layer."""
    config = base_config(file, default_num_kv_heads=4, is_tied_by_default=True)
    has_attention_bias = file.flag("attention_bias", False)
    rotated = _rotated_layers_smollm3(file, config.num_layers)
    return replace(
        with_rope(config, file, default_theta=_THETA_SMOLLM3),
        rotated_layers=rotated,
        sliding_windows=_windows_smollm3(file, rotated),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=file.flag("mlp_bias", False),
    )


def _rotated_layers_smollm3(file: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has rope; 1 in `no_rope_layers` says that it has."""
    interval = file.integer("no_rope_layer_interval", 4, most=MAX_LAYERS)
    if "no_rope_layers" not in file:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    values = file.value("no_rope_layers")
    if not isinstance(values, list) or len(values) != num_layers or not set(values) <= {0, 1}:
        raise file.rejection("no_rope_layers", f"must be a list of {num_layers} numbers, 0 or 1")
    return tuple(bool(value) for value in values)


def _windows_smollm3(file: ConfigFile, rotated: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Return the windows, which by default layers without rope have."""
    file.note_read("sliding_window", "max_window_layers")
    has_window = has_window_by_layer(file, len(rotated))
    if any(has_window) and not file.flag("use_sliding_window", False):
        # Transformers masks by the window or not, depending on its implementation of attention.
        raise file.rejection(
            "layer_types", "may contain only full_attention unless use_sliding_window is true"
        )
    if not file.flag("use_sliding_window", False) or "sliding_window" not in file:
        return ()
    window = file.integer("sliding_window", most=MAX_POSITIONS)
    return tuple(window if has else None for has in has_window or [not one for one in rotated])


SMOLLM3 = Family(architecture="SmolLM3ForCausalLM", model_types=("smollm3",), reader=_read_smollm3)


def _read_ernie4_5(file: ConfigFile) -> ModelConfig:
    """Ernie 4.5 (dense): Llama with rope of adjacent pairs."""
    config = base_config(
        file,
        default_num_kv_heads=2,
        default_head_size=128,
        default_norm_eps=1e-5,
        is_tied_by_default=True,
    )
    config = with_rope(config, file, default_theta=_THETA_ERNIE4_5)
    file.reject_unless("compression_ratio", 1)
    has_bias = file.flag("use_bias", False)
    assert config.rope is not None
    return replace(
        config,
        rope=replace(config.rope, is_interleaved=True),
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
    )


ERNIE4_5 = Family(
    architecture="Ernie4_5ForCausalLM",
    model_types=("ernie4_5",),
    reader=_read_ernie4_5,
    aliases=("Ernie4_5_ForCausalLM",),
)


def _read_phi3(file: ConfigFile) -> ModelConfig:
    """Phi-3: Llama with fused projections, LongRoPE and one sliding window for all layers."""
    config = base_config(file, default_norm_eps=1e-5)
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        file.reject_unless(key, False)
    # Options of code in Phi-4-mini's checkpoint, which transformers lacks.
    for key in ("full_attn_mod", "interpolate_factor"):
        file.reject_unless(key, 1)
    rope, max_positions, long_context = read_longrope(
        file, head_size=config.head_size, max_positions=config.max_positions
    )
    windows: tuple[int, ...] = ()
    if "sliding_window" in file:
        windows = (file.integer("sliding_window", most=MAX_POSITIONS),) * config.num_layers
    return replace(
        config,
        names=_NAMES_PHI3,
        rope=rope,
        max_positions=max_positions,
        long_context=long_context,
        sliding_windows=windows,
    )


PHI3 = Family(architecture="Phi3ForCausalLM", model_types=("phi3",), reader=_read_phi3)


def _read_starcoder2(file: ConfigFile) -> ModelConfig:
    """StarCoder2: layer norms, biases, an MLP without a gate, one sliding window for all layers."""
    config = base_config(
        file,
        activation="gelu_tanh",
        activation_key="hidden_act",
        default_num_kv_heads=2,
        norm_eps_key="norm_epsilon",
        default_norm_eps=1e-5,
        is_tied_by_default=True,
    )
    # Second spellings, which transformers ignores.
    file.note_read("activation_function", "layer_norm_epsilon", "rms_norm_eps")
    file.choice("mlp_type", ("default",), "default")
    file.choice("norm_type", ("layer_norm",), "layer_norm")
    windows: tuple[int, ...] = ()
    if "sliding_window" in file:
        windows = (file.integer("sliding_window", most=MAX_POSITIONS),) * config.num_layers
    has_bias = file.flag("use_bias", True)
    return replace(
        with_rope(config, file),
        names=_NAMES_STARCODER2,
        norm_kind="layer",
        has_norm_bias=True,
        sliding_windows=windows,
        is_mlp_gated=False,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
    )


STARCODER2 = Family(
    architecture="Starcoder2ForCausalLM", model_types=("starcoder2",), reader=_read_starcoder2
)


def _read_glm(file: ConfigFile, names: TensorNames) -> ModelConfig:
    """GLM-4: rope of adjacent pairs on half of each head, gate and up projection fused.

    `Glm4ForCausalLM` (0414) adds norms after attention and MLP to `GlmForCausalLM`.

    """
    config = base_config(
        file, default_num_kv_heads=2, default_head_size=128, default_norm_eps=_NORM_EPS_GLM4
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


GLM = Family(
    architecture="GlmForCausalLM",
    model_types=("glm",),
    reader=partial(_read_glm, names=_NAMES_GLM4),
)
GLM4 = Family(
    architecture="Glm4ForCausalLM",
    model_types=("glm4",),
    reader=partial(_read_glm, names=_NAMES_OF_FOUR_NORMS_GLM4),
)


def _read_glm4_moe(file: ConfigFile) -> ModelConfig:
    """GLM-4.5, 4.6 and 4.7: rope on half of each head, and experts that sigmoid scores choose.

    The layer behind the last one predicts several tokens.

    """
    config = base_config(file, default_num_kv_heads=8, default_norm_eps=1e-5)
    section = rope_section(file)
    theta = file.number("rope_theta", 10000.0, most=MAX_THETA)
    rope = rope_of(section, file, default_theta=theta)
    size = rotary_size(file, section, config.head_size, default_factor=0.5)
    column_size = file.integer("moe_intermediate_size", 1408, most=MAX_SIZE)
    experts = scored_experts(
        file,
        num_experts=file.integer(
            file.first_of("num_local_experts", "n_routed_experts"), 128, least=2, most=MAX_EXPERTS
        ),
        default_num_chosen=8,
        intermediate_size=column_size,
        shared_size=column_size * file.integer("n_shared_experts", 1, most=MAX_EXPERTS),
    )
    num_dense = file.integer("first_k_dense_replace", 1, least=0, most=MAX_LAYERS)
    number = config.num_layers
    key = file.first_of("num_mtp_layers", "num_nextn_predict_layers")
    num_mtp_layers = file.integer(key, 1, least=0, most=MAX_LAYERS)
    prefixes = [f"model.layers.{number + index}" for index in range(num_mtp_layers)]
    return replace(
        config,
        names=_NAMES_GLM4_MOE,
        stacked_names=_STACKED_NAMES_GLM4_MOE,
        text_tensors=TextTensors((), tuple(f"{prefix}." for prefix in prefixes)),
        mtp=_mtp_glm4_moe(prefixes[0]) if prefixes else None,
        rope=replace(rope, rotary_size=size),
        has_qkv_bias=file.flag("attention_bias", False),
        has_qk_norm=file.flag("use_qk_norm", False),
        experts=replace(experts, dense_layers=tuple(range(min(num_dense, number)))),
    )


def _mtp_glm4_moe(prefix: str) -> MtpLayer:
    return MtpLayer(
        decoder_layer=prefix,
        token_norm=f"{prefix}.enorm",
        state_norm=f"{prefix}.hnorm",
        projection=f"{prefix}.eh_proj",
        last_norm=f"{prefix}.shared_head.norm",
    )


GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM", model_types=("glm4_moe",), reader=_read_glm4_moe
)


def _read_cohere2(file: ConfigFile) -> ModelConfig:
    """Cohere-2 (Command R7B, Command A): parallel MLP, rope on layers with windows."""
    config = base_config(
        file, norm_eps_key="layer_norm_eps", default_norm_eps=1e-5, is_tied_by_default=True
    )
    config = with_rope(config, file)
    for key, value in _FIXED_COHERE2.items():
        file.reject_unless(key, value)
    # The period of the older spelling; that of `layer_types` wins.
    pattern = file.integer("sliding_window_pattern", 4, most=MAX_LAYERS)
    windows = windows_by_layer_type(
        file,
        default_window=4096,
        has_window_by_default=[(layer + 1) % pattern != 0 for layer in range(config.num_layers)],
    )
    has_bias = file.flag("attention_bias", False)
    assert config.rope is not None
    return replace(
        config,
        names=_NAMES_COHERE2,
        norm_kind="layer",
        rope=replace(config.rope, is_interleaved=True),
        rotated_layers=tuple(window is not None for window in windows),
        sliding_windows=windows,
        has_parallel_mlp=True,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        logit_scale=file.number("logit_scale", 0.0625, most=_MAX_SCALE_COHERE2),
    )


COHERE2 = Family(architecture="Cohere2ForCausalLM", model_types=("cohere2",), reader=_read_cohere2)

"""Families of Granite."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, RecurrentConfig, TensorNames
from workers.models.config_json.family import (
    MAX_FACTOR,
    MAX_SIZE,
    MAX_THETA,
    Family,
    base_config,
    experts_of,
    recurrent_layers,
    selective_scans,
    windows_by_layer_type,
)
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GRANITE", "GRANITE_HYBRID", "GRANITE_MOE", "GRANITE_MOE_SHARED", "GRANITE_MOE_SWA"]

_NAMES_GRANITE_MOE = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_input=("block_sparse_moe.input_linear.weight",),
    expert_output="block_sparse_moe.output_linear.weight",
    shared_input=("shared_mlp.input_linear",),
    shared_output="shared_mlp.output_linear",
)
_STACKED_NAMES_GRANITE_MOE = replace(
    _NAMES_GRANITE_MOE,
    router="block_sparse_moe.router",
    expert_input=("block_sparse_moe.experts.gate_up_proj",),
    expert_output="block_sparse_moe.experts.down_proj",
)

_STACKED_HYBRID = replace(_STACKED_NAMES_GRANITE_MOE, recurrent="mamba")
_NAMES_DENSE_HYBRID = TensorNames(
    recurrent="mamba", mlp_input=("shared_mlp.input_linear",), mlp_output="shared_mlp.output_linear"
)


def granite_config(file: ConfigFile) -> ModelConfig:
    """Return the common configuration of all Granites."""

    def factor(key: str) -> float:
        return file.number(key, 1.0, most=MAX_FACTOR)

    has_attention_bias = file.flag("attention_bias", False)
    return replace(
        with_rope(base_config(file), file),
        embedding_scale=factor("embedding_multiplier"),
        attention_scale=factor("attention_multiplier"),
        residual_scale=factor("residual_multiplier"),
        logit_scale=1.0 / factor("logits_scaling"),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
    )


def _read_granite(file: ConfigFile) -> ModelConfig:
    """Granite: Llama with multipliers of embeddings, scores, outputs of layers and logits."""
    config = granite_config(file)
    return replace(config, has_mlp_bias=file.flag("mlp_bias", False))


GRANITE = Family(architecture="GraniteForCausalLM", model_types=("granite",), reader=_read_granite)


def _read_granite_moe(file: ConfigFile, shared_size: int = 0) -> ModelConfig:
    """Granite with experts.

    `GraniteMoeSharedForCausalLM` adds an MLP that every token passes, and
    `GraniteMoeSWAForCausalLM` sliding windows, attention sinks and layers without rope.

    """
    config = granite_config(file)
    experts = experts_of(
        file,
        default_num=8,
        default_num_chosen=2,
        intermediate_size=config.intermediate_size,
        # It takes the softmax over the chosen experts, which is the same.
        is_renormalized=True,
    )
    return replace(
        config,
        names=_NAMES_GRANITE_MOE,
        stacked_names=_STACKED_NAMES_GRANITE_MOE,
        experts=replace(experts, shared_size=shared_size or None),
    )


def _shared_size_granite_moe(file: ConfigFile) -> int:
    return file.integer("shared_intermediate_size", 0, least=0, most=MAX_SIZE)


def _read_shared_granite_moe(file: ConfigFile) -> ModelConfig:
    return _read_granite_moe(file, _shared_size_granite_moe(file))


def _read_swa_granite_moe(file: ConfigFile) -> ModelConfig:
    config = _read_granite_moe(file, _shared_size_granite_moe(file))
    windows = windows_by_layer_type(
        file,
        default_window=128,
        has_window_by_default=[layer % 4 != 0 for layer in range(config.num_layers)],
    )
    return replace(
        _with_thetas_granite_moe(config, file),
        names=_STACKED_NAMES_GRANITE_MOE,
        stacked_names=None,
        sliding_windows=windows,
        has_sinks=True,
    )


def _with_thetas_granite_moe(config: ModelConfig, file: ConfigFile) -> ModelConfig:
    """Return the configuration with the rope of `layer_rope_theta`, where 0 is none."""
    if "layer_rope_theta" not in file:
        return config
    thetas = file.numbers("layer_rope_theta", config.num_layers, least=-1.0, most=MAX_THETA)
    given = {theta for theta in thetas if theta}
    if len(given) > 1 or min(thetas) < 0.0:
        raise file.rejection("layer_rope_theta", "must contain only 0 and one number above 0")
    if not given:
        return replace(config, rope=None)
    assert config.rope is not None
    return replace(
        config,
        rope=replace(config.rope, theta=given.pop()),
        rotated_layers=tuple(theta > 0.0 for theta in thetas),
    )


GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM", model_types=("granitemoe",), reader=_read_granite_moe
)

GRANITE_MOE_SHARED = Family(
    architecture="GraniteMoeSharedForCausalLM",
    model_types=("granitemoeshared",),
    reader=_read_shared_granite_moe,
)

GRANITE_MOE_SWA = Family(
    architecture="GraniteMoeSWAForCausalLM",
    model_types=("granitemoe_swa",),
    reader=_read_swa_granite_moe,
)


def _read_hybrid_granite(file: ConfigFile) -> ModelConfig:
    """Granite 4 h: Mamba-2 on most layers, a shared MLP, and experts on all layers or on none."""
    shared_size = file.integer("shared_intermediate_size", 1024, most=MAX_SIZE)
    has_rope = "position_embedding_type" in file
    if has_rope:
        has_rope = file.choice("position_embedding_type", ("rope", "nope")) == "rope"
    if file.integer("num_local_experts", 8, least=0, most=MAX_SIZE):
        config = _read_granite_moe(file, shared_size)
        config = replace(
            config, names=replace(config.names, recurrent="mamba"), stacked_names=_STACKED_HYBRID
        )
    else:
        file.note_read("num_experts_per_tok")
        config = granite_config(file)
        config = replace(config, names=_NAMES_DENSE_HYBRID, intermediate_size=shared_size)
    return replace(
        config, rope=config.rope if has_rope else None, recurrent=_recurrent_granite(file, config)
    )


def _recurrent_granite(file: ConfigFile, config: ModelConfig) -> RecurrentConfig | None:
    layers = recurrent_layers(
        file,
        config.num_layers,
        "mamba",
        "linear_attention",
        by_default=[True] * config.num_layers,
        attention=("attention", "full_attention"),
    )
    size = file.integer("mamba_expand", 2, most=MAX_SIZE) * config.hidden_size
    recurrent = selective_scans(file, layers, size)
    return recurrent if layers else None


GRANITE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_types=("granitemoehybrid",),
    reader=_read_hybrid_granite,
)

"""Families of LFM2 and LFM2.5: short convolutions, and attention on some layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, RecurrentConfig, TensorNames
from workers.models.config_json.family import (
    MAX_FACTOR,
    MAX_LAYERS,
    MAX_RECURRENT_WIDTH,
    MAX_SIZE,
    Family,
    base_config,
    experts_of,
    recurrent_layers,
)
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["LFM2", "LFM2_MOE"]

_THETA = 1e6
_SUM_EPS = 1e-6
_NAMES = TensorNames(
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    qk_norms=("self_attn.q_layernorm", "self_attn.k_layernorm"),
    attention_output="self_attn.out_proj",
    recurrent="conv",
    mlp_input=("feed_forward.w1", "feed_forward.w3"),
    mlp_output="feed_forward.w2",
)
_NAMES_MOE = replace(
    _NAMES,
    router="feed_forward.gate",
    router_bias="feed_forward.expert_bias",
    expert_input=("feed_forward.experts.{}.w1.weight", "feed_forward.experts.{}.w3.weight"),
    expert_output="feed_forward.experts.{}.w2.weight",
)
_STACKED_NAMES_MOE = replace(
    _NAMES_MOE,
    expert_input=("feed_forward.experts.gate_up_proj",),
    expert_output="feed_forward.experts.down_proj",
)
# Fields of the code with which the models were trained; transformers reads other fields.
_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
    "theta",
)


def _read_any(file: ConfigFile, names: TensorNames) -> ModelConfig:
    is_tied = file.flag(file.first_of("tie_embedding", "tie_word_embeddings"), True)
    config = base_config(
        file,
        default_num_kv_heads=8,
        intermediate_key=file.first_of("block_ff_dim", "intermediate_size"),
        norm_eps_key="norm_eps",
        default_norm_eps=1e-5,
        is_tied_by_default=True,
    )
    file.note_read(*_UNUSED)
    for key in ("block_use_swiglu", "use_pos_enc"):
        file.reject_unless(key, True)
    has_bias = file.flag("conv_bias", False)
    attention = file.indices("full_attn_idxs", most=MAX_LAYERS)
    if "full_attn_idxs" not in file:
        attention = tuple(range(config.num_layers))
    layers = recurrent_layers(
        file,
        config.num_layers,
        "conv",
        by_default=[layer not in attention for layer in range(config.num_layers)],
    )
    recurrent = RecurrentConfig(
        kind="short_conv",
        layers=layers,
        conv_width=file.integer("conv_L_cache", 3, least=2, most=MAX_RECURRENT_WIDTH),
        has_conv_bias=has_bias,
        has_bias=has_bias,
        has_output_bias=has_bias,
    )
    return replace(
        with_rope(config, file, default_theta=_THETA),
        names=names,
        has_qk_norm=True,
        has_tied_embeddings=is_tied,
        recurrent=recurrent if layers else None,
    )


def _read_lfm2(file: ConfigFile) -> ModelConfig:
    """LFM2: the width of the MLP is two thirds of that in the file, rounded up to a multiple."""
    config = _read_any(file, _NAMES)
    multiple = file.integer("block_multiple_of", 256, most=MAX_SIZE)
    factor = file.number("block_ffn_dim_multiplier", 1.0, most=MAX_FACTOR)
    if not file.flag("block_auto_adjust_ff_dim", True):
        return config
    size = int(factor * int(2 * config.intermediate_size / 3))
    return replace(config, intermediate_size=-(-size // multiple) * multiple)


LFM2 = Family(architecture="Lfm2ForCausalLM", model_types=("lfm2",), reader=_read_lfm2)


def _read_lfm2_moe(file: ConfigFile) -> ModelConfig:
    """LFM2 with experts, which sigmoid scores choose, behind some layers with an MLP."""
    config = _read_any(file, _NAMES_MOE)
    experts = experts_of(
        file,
        default_num=32,
        default_num_chosen=4,
        intermediate_size=file.integer("moe_intermediate_size", 1792, most=MAX_SIZE),
        is_renormalized=file.flag("norm_topk_prob", True),
    )
    num_dense = file.integer("num_dense_layers", 2, least=0, most=MAX_LAYERS)
    return replace(
        config,
        stacked_names=_STACKED_NAMES_MOE,
        experts=replace(
            experts,
            dense_layers=tuple(range(min(num_dense, config.num_layers))),
            has_sigmoid_scores=True,
            has_choice_bias=file.flag("use_expert_bias", True),
            weight_scale=file.number("routed_scaling_factor", 1.0, most=MAX_FACTOR),
            sum_eps=_SUM_EPS,
        ),
    )


LFM2_MOE = Family(
    architecture="Lfm2MoeForCausalLM", model_types=("lfm2_moe",), reader=_read_lfm2_moe
)

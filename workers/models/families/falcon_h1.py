"""Falcon-H1: attention and Mamba-2 side by side in each layer, with the multipliers of muP."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import ModelConfig, Multipliers, RecurrentConfig, ScanNorm, TensorNames
from workers.models.config_json.family import (
    MAX_FACTOR,
    MAX_SIZE,
    Family,
    base_config,
    recurrent_layers,
    selective_scans,
)
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["FALCON_H1"]

_NAMES = TensorNames(
    final_norm="model.final_layernorm",
    recurrent="mamba",
    mlp_norm="pre_ff_layernorm",
    mlp_input=("feed_forward.gate_proj", "feed_forward.up_proj"),
    mlp_output="feed_forward.down_proj",
)
# Fields of the code with which the models were trained.
_UNUSED = ("mlp_expansion_factor", "num_logits_to_keep", "time_step_floor", "time_step_max")
_NUM_COLUMNS = 5
"""Kinds of columns of the input projection: gate, inputs, B, C and step sizes."""


def _read_falcon_h1(file: ConfigFile) -> ModelConfig:
    config = base_config(file, default_num_kv_heads=8, default_norm_eps=1e-5)
    file.note_read(*_UNUSED, "time_step_min")
    file.reject_unless("attn_layer_indices", None)
    file.reject_unless("mamba_use_mlp", True)
    file.reject_unless("sliding_window", None)
    has_attention_bias = file.flag("attention_bias", False)
    key_multiplier = _multiplier(file, "key_multiplier")
    return replace(
        with_rope(config, file),
        names=_NAMES,
        # The rope of a multiplied key is the multiple of its rope.
        attention_scale=key_multiplier * config.head_size**-0.5,
        embedding_scale=_multiplier(file, "embedding_multiplier"),
        logit_scale=_multiplier(file, "lm_head_multiplier"),
        has_qkv_bias=has_attention_bias,
        has_output_bias=has_attention_bias,
        has_mlp_bias=file.flag("mlp_bias", False),
        multipliers=_multipliers(file),
        recurrent=_recurrent(file, config),
    )


def _recurrent(file: ConfigFile, config: ModelConfig) -> RecurrentConfig:
    layers = tuple(range(config.num_layers))
    for key in ("layer_types", "layers_block_type"):
        recurrent_layers(
            file, len(layers), "hybrid", by_default=[True] * len(layers), attention=(), key=key
        )
    for key in ("mamba_conv_bias", "mamba_norm_before_gate"):
        if file.has_null(key):
            # Transformers takes it for false, and a missing key for true.
            raise file.rejection(key, "must be true or false, not null")
    file.note_read("mamba_expand")
    if file.has_null("mamba_d_ssm"):
        size = int(file.number("mamba_expand", 2.0, most=MAX_FACTOR) * config.hidden_size)
    else:
        size = file.integer("mamba_d_ssm", 1024, most=MAX_SIZE)
    norm: ScanNorm = "after_gate"
    if file.flag("mamba_norm_before_gate", True):
        norm = "before_gate"
    return replace(
        selective_scans(file, layers, size),
        has_output_bias=file.flag("projectors_bias", False),
        scan_norm=norm if file.flag("mamba_rms_norm", False) else None,
        is_beside_attention=True,
    )


def _multipliers(file: ConfigFile) -> Multipliers:
    gate, output = (1.0, 1.0)
    if "mlp_multipliers" in file:
        gate, output = file.numbers("mlp_multipliers", 2, most=MAX_FACTOR)
    columns = (1.0,) * _NUM_COLUMNS
    if "ssm_multipliers" in file:
        columns = file.numbers("ssm_multipliers", _NUM_COLUMNS, most=MAX_FACTOR)
    return Multipliers(
        attention_input=_multiplier(file, "attention_in_multiplier"),
        attention_output=_multiplier(file, "attention_out_multiplier"),
        recurrent_input=_multiplier(file, "ssm_in_multiplier"),
        recurrent_output=_multiplier(file, "ssm_out_multiplier"),
        recurrent_columns=columns,
        mlp_gate=gate,
        mlp_output=output,
    )


def _multiplier(file: ConfigFile, key: str) -> float:
    return file.number(key, 1.0, most=MAX_FACTOR)


FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM", model_types=("falcon_h1",), reader=_read_falcon_h1
)

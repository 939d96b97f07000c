"""StarCoder2: layer norms, biases, an MLP without a gate, one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_POSITIONS
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["STARCODER2"]

_NAMES = TensorNames(mlp_input=("mlp.c_fc",), mlp_output="mlp.c_proj")


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(
        file,
        STARCODER2.architecture,
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
        names=_NAMES,
        norm_kind="layer",
        has_norm_bias=True,
        sliding_windows=windows,
        is_mlp_gated=False,
        has_qkv_bias=has_bias,
        has_output_bias=has_bias,
        has_mlp_bias=has_bias,
    )


STARCODER2 = Family(architecture="Starcoder2ForCausalLM", model_types=("starcoder2",), read=_read)

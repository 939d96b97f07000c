"""Phi-3: Llama with fused projections, LongRoPE and one sliding window for all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_POSITIONS
from workers.models.config_json.longrope import read_longrope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["PHI3"]

_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), mlp_input=("mlp.gate_up_proj",))


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(file, PHI3.architecture, default_norm_eps=1e-5)
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
        names=_NAMES,
        rope=rope,
        max_positions=max_positions,
        long_context=long_context,
        sliding_windows=windows,
    )


PHI3 = Family(architecture="Phi3ForCausalLM", model_types=("phi3",), read=_read)

"""Mixtral: Mistral with experts on all layers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.experts import STACKED_NAMES, experts_of
from workers.models.config_json.family import Family, base_config
from workers.models.config_json.limits import MAX_POSITIONS
from workers.models.config_json.rope_section import with_rope

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MIXTRAL"]

_THETA = 1e6
_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert_input=(
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    expert_output="block_sparse_moe.experts.{}.w2.weight",
)


def _read(file: ConfigFile) -> ModelConfig:
    config = base_config(file, MIXTRAL.architecture, default_num_kv_heads=8, default_norm_eps=1e-5)
    windows: tuple[int, ...] = ()
    if "sliding_window" in file:
        window = file.integer("sliding_window", most=MAX_POSITIONS)
        windows = (window,) * config.num_layers
    return replace(
        with_rope(config, file, default_theta=_THETA),
        names=_NAMES,
        stacked_names=STACKED_NAMES,
        sliding_windows=windows,
        experts=experts_of(
            file,
            default_num=8,
            default_num_chosen=2,
            intermediate_size=config.intermediate_size,
            is_renormalized=True,
        ),
    )


MIXTRAL = Family(architecture="MixtralForCausalLM", model_types=("mixtral",), read=_read)

"""Granite with experts.

`GraniteMoeSharedForCausalLM` adds an MLP that every token passes, and `GraniteMoeSWAForCausalLM`
sliding windows, attention sinks and layers without rope.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.model_config import TensorNames
from workers.models.config_json.experts import experts_of
from workers.models.config_json.family import Family
from workers.models.config_json.limits import MAX_SIZE, MAX_THETA
from workers.models.config_json.sliding_windows import windows_by_layer_type
from workers.models.families.dense.granite import granite_config

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GRANITE_MOE", "GRANITE_MOE_SHARED", "GRANITE_MOE_SWA"]

_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_input=("block_sparse_moe.input_linear.weight",),
    expert_output="block_sparse_moe.output_linear.weight",
    shared_input=("shared_mlp.input_linear",),
    shared_output="shared_mlp.output_linear",
)

_STACKED_NAMES = replace(
    _NAMES,
    router="block_sparse_moe.router",
    expert_input=("block_sparse_moe.experts.gate_up_proj",),
    expert_output="block_sparse_moe.experts.down_proj",
)


def _read(file: ConfigFile, architecture: str, shared_size: int) -> ModelConfig:
    config = granite_config(file, architecture)
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
        names=_NAMES,
        stacked_names=_STACKED_NAMES,
        experts=replace(experts, shared_size=shared_size or None),
    )


def _read_plain(file: ConfigFile) -> ModelConfig:
    return _read(file, GRANITE_MOE.architecture, 0)


def _shared_size(file: ConfigFile) -> int:
    return file.integer("shared_intermediate_size", 0, least=0, most=MAX_SIZE)


def _read_shared(file: ConfigFile) -> ModelConfig:
    return _read(file, GRANITE_MOE_SHARED.architecture, _shared_size(file))


def _read_swa(file: ConfigFile) -> ModelConfig:
    config = _read(file, GRANITE_MOE_SWA.architecture, _shared_size(file))
    windows = windows_by_layer_type(
        file,
        default_window=128,
        has_window_by_default=[layer % 4 != 0 for layer in range(config.num_layers)],
    )
    return replace(
        _with_thetas(config, file),
        names=_STACKED_NAMES,
        stacked_names=None,
        sliding_windows=windows,
        has_sinks=True,
    )


def _with_thetas(config: ModelConfig, file: ConfigFile) -> ModelConfig:
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
    architecture="GraniteMoeForCausalLM", model_types=("granitemoe",), read=_read_plain
)
GRANITE_MOE_SHARED = Family(
    architecture="GraniteMoeSharedForCausalLM",
    model_types=("granitemoeshared",),
    read=_read_shared,
)
GRANITE_MOE_SWA = Family(
    architecture="GraniteMoeSWAForCausalLM", model_types=("granitemoe_swa",), read=_read_swa
)

"""Granite with experts; `GraniteMoeSharedForCausalLM` adds an MLP that every token passes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.config import TensorNames
from workers.models.config_json.experts import experts_of
from workers.models.config_json.family import MAX_SIZE, Family
from workers.models.families.granite import granite_config

if TYPE_CHECKING:
    from pagedray.config import ModelConfig
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["GRANITE_MOE", "GRANITE_MOE_SHARED"]

_NAMES = TensorNames(
    router="block_sparse_moe.router.layer",
    expert_input=("block_sparse_moe.input_linear",),
    expert_output="block_sparse_moe.output_linear",
    shared_input=("shared_mlp.input_linear",),
    shared_output="shared_mlp.output_linear",
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
    return replace(config, names=_NAMES, experts=replace(experts, shared_size=shared_size or None))


def _read_plain(file: ConfigFile) -> ModelConfig:
    return _read(file, GRANITE_MOE.architecture, 0)


def _read_shared(file: ConfigFile) -> ModelConfig:
    size = file.integer("shared_intermediate_size", 0, least=0, most=MAX_SIZE)
    return _read(file, GRANITE_MOE_SHARED.architecture, size)


GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM", model_types=("granitemoe",), read=_read_plain
)
GRANITE_MOE_SHARED = Family(
    architecture="GraniteMoeSharedForCausalLM",
    model_types=("granitemoeshared",),
    read=_read_shared,
)

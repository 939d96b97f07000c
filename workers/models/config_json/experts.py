"""Reads experts from `config.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.model_config import ExpertsConfig, TensorNames

if TYPE_CHECKING:
    from workers.models.config_json.config_file import ConfigFile

__all__ = ["MAX_EXPERTS", "STACKED_NAMES", "experts_of"]

MAX_EXPERTS = 2**12
STACKED_NAMES = TensorNames(
    expert_input=("mlp.experts.gate_up_proj",), expert_output="mlp.experts.down_proj"
)
"""Names of transformers' own modules."""
# Transformers takes one name for the other.
_NUM_KEYS = ("num_experts", "num_local_experts")


def experts_of(
    file: ConfigFile,
    *,
    default_num: int,
    default_num_chosen: int,
    intermediate_size: int,
    is_renormalized: bool,
) -> ExpertsConfig:
    """Return the experts of all layers; defaults stand for missing keys."""
    given = [key for key in _NUM_KEYS if key in file]
    num_experts = file.integer(given[0] if given else _NUM_KEYS[0], default_num, most=MAX_EXPERTS)
    if len(given) == len(_NUM_KEYS) and file.value(given[1]) != num_experts:
        raise file.rejection(given[1], f"must be equal to {given[0]} {num_experts}")
    num_chosen = file.integer("num_experts_per_tok", default_num_chosen, most=num_experts)
    return ExpertsConfig(
        num_experts=num_experts,
        num_chosen=num_chosen,
        intermediate_size=intermediate_size,
        is_renormalized=is_renormalized,
    )

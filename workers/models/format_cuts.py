"""Checks whether the ranks of a group can divide weights that are stored in groups of inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import StartupError
from pagedray.weight_format import Int4Format

if TYPE_CHECKING:
    from pagedray.model_config import ModelConfig
    from pagedray.weight_format import Quantization

__all__ = ["check_cuts"]

_HEAD = "lm_head"


def check_cuts(model: ModelConfig, num_ranks: int) -> None:
    """Raise StartupError if a rank's part of a layer's inputs would cut a group of them."""
    if model.quantization is None:
        return
    names = model.names
    layers = (
        (names.attention_output, model.num_heads * model.head_size),
        (names.mlp_output, model.intermediate_size),
    )
    for index in range(model.num_layers):
        for output, in_size in layers:
            name = f"{names.decoder_layer.format(index)}.{output}"
            format = model.quantization.format_of([name])
            if isinstance(format, Int4Format) and format.is_ordered and num_ranks > 1:
                raise StartupError(
                    f"{name} is stored in another order of its inputs (desc_act), which "
                    f"{num_ranks} ranks cannot divide; use one rank."
                )
            if format is not None and num_ranks > 1 and in_size // num_ranks % format.in_step:
                raise StartupError(
                    f"{name} has {in_size} inputs in groups of {format.in_step}, which "
                    f"{num_ranks} ranks cannot divide evenly; use fewer ranks."
                )
    if _has_quantized_head(model, model.quantization) and model.vocab_size % num_ranks:
        raise StartupError(
            f"{_HEAD} is quantized and has {model.vocab_size} outputs, which {num_ranks} "
            "ranks cannot divide evenly; use a number of ranks that can."
        )


def _has_quantized_head(model: ModelConfig, quantization: Quantization) -> bool:
    has_head = quantization.has_head and not model.has_tied_embeddings and not model.pools
    return has_head and quantization.format_of([_HEAD]) is not None

"""The configuration of a model with plain weights that are quantized when loaded."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import StartupError
from pagedray.weight_format import FormatRule, Fp8Format, Quantization

if TYPE_CHECKING:
    from pagedray.config import QuantizationMethod
    from pagedray.model_config import ModelConfig

__all__ = ["with_method"]

_FP8 = Quantization(
    method="fp8",
    rules=(FormatRule(re.compile(""), Fp8Format(is_made_at_load=True)),),
)


def with_method(model: ModelConfig, method: QuantizationMethod) -> ModelConfig:
    """Return the configuration of a model with weights in this format.

    Raises StartupError. A quantized checkpoint keeps its format, which must be the same.
    """
    if model.quantization is not None:
        if model.quantization.method != method:
            raise StartupError(
                f"quantization {method} was given, but the checkpoint's quantization_config is "
                f"{model.quantization.method}; leave the option out."
            )
        return model
    if method != "fp8":
        raise StartupError(
            f"quantization {method} requires a checkpoint in this format, but {model.name} has "
            "plain weights, which can be quantized to fp8 only."
        )
    if model.is_encoder or model.experts is not None:
        what = "an encoder" if model.is_encoder else "a model with experts"
        raise StartupError(
            f"quantization fp8 is not supported for {what} such as {model.name}; leave it out."
        )
    return replace(model, quantization=_FP8)

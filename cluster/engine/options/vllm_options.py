"""Engine options under vLLM's names and values, for programs and commands written for it."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.engine.options.engine_options import EngineOptions, reject_remote_code
from cluster.engine.options.option_values import checked_options
from cluster.engine.options.vllm_option_notes import ALIASES, REJECTED, has_no_effect
from pagedray.errors import StartupError
from pagedray.wording.nearest_name import nearest_name
from pagedray.wording.shown_value import shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["context_length", "engine_options", "own_options", "own_value"]

_VALUES: Mapping[str, Mapping[object, object]] = {
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TORCH_SDPA": "torch_sdpa",
        "XFORMERS": "xformers",
    },
    "device": {"auto": None},
    "task": {"auto": None, "embedding": "embed"},
    "dtype": {"auto": None, "half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": {"safetensors": "auto"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "executor": {"mp": "local", "uni": "local"},
}
"""vLLM's values of our options."""
_LENGTH = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def engine_options(given: Mapping[str, object]) -> EngineOptions:
    """Return options by our names and values, or vLLM's.

    Raises StartupError for one that we do not have, and for a value that it does not take.
    """
    return checked_options(own_options(given), EngineOptions, what="option", takes_text=False)


def own_options(given: Mapping[str, object]) -> dict[str, object]:
    """Return options by our names and values. Raises StartupError for one that we do not have."""
    if given.get("trust_remote_code"):
        reject_remote_code(given)
    known = {field.name for field in fields(EngineOptions)}
    options: dict[str, object] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in known:
            if own in options:
                raise StartupError(f"{name} and another name of {own} cannot be used together.")
            options[own] = own_value(own, value)
        elif not has_no_effect(name, value):
            raise StartupError(_rejection(name, value, known))
    return options


def own_value(name: str, value: object) -> object:
    """Return vLLM's value of one of our options as ours."""
    if name == "max_model_len":
        return context_length(value) if isinstance(value, str) else None if value == -1 else value
    if isinstance(value, str):
        return _VALUES.get(name, {}).get(value, value)
    return value


def context_length(text: str) -> int | None:
    """Return a number of tokens such as 32768, 32K (1024 each) or 32k; None for `auto`.

    Raises StartupError.
    """
    if text in ("auto", "-1"):
        return None
    found = _LENGTH.fullmatch(text)
    number = float(found[1]) * _UNITS[found[2]] if found else 0.5
    if not number.is_integer():
        raise StartupError(
            f"max_model_len must be a number of tokens such as 32768, 32K or auto, "
            f"not {shown_value(text)}."
        )
    return int(number)


def _rejection(name: str, value: object, known: set[str]) -> str:
    if name in REJECTED:
        return f"{name} = {shown_value(value)} is not supported: {REJECTED[name]}."
    nearest = nearest_name(name, known | ALIASES.keys())
    return f"{name} is not an option{'.' if nearest is None else f'; did you mean {nearest}?'}"

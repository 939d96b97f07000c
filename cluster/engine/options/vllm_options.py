"""Engine options under vLLM's names and values, for programs and commands written for it."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.engine.options.engine_options import EngineOptions
from cluster.engine.options.option_values import checked_options
from cluster.engine.options.vllm_option_notes import (
    ALIASES,
    OVERRIDES,
    REJECTED,
    ignored_reason,
    is_our_behavior,
)
from pagedray.errors import StartupError
from pagedray.text import nearest_name, quote

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["engine_options", "notice_level", "own_options", "own_value", "token_count"]

logger = logging.getLogger(__name__)

_VALUES: Mapping[str, Mapping[object, object]] = {
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TORCH_SDPA": "torch_sdpa",
        "XFORMERS": "xformers",
    },
    "device": {"auto": None},
    "task": {"auto": None, "none": None, "embedding": "embed"},
    "dtype": {
        "auto": None,
        "bf16": "bfloat16",
        "float": "float32",
        "fp16": "float16",
        "fp32": "float32",
        "half": "float16",
    },
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": dict.fromkeys(
        ("safetensors", "hf", "fastsafetensors", "instanttensor", "runai_streamer"), "auto"
    ),
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "executor": {"mp": None, "uni": "local"},
}
"""vLLM's values of our options; None selects the default."""
_COUNTS = ("max_model_len", "max_num_batched_tokens")
_OBJECTS = ("hf_overrides", "override_generation_config")
_LENGTH = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def engine_options(given: Mapping[str, object]) -> EngineOptions:
    """Return options by our names and values, or vLLM's.

    Raises StartupError for an unknown option or an invalid value.
    """
    return checked_options(own_options(given), EngineOptions, what="option", takes_text=False)


def own_options(given: Mapping[str, object]) -> dict[str, object]:
    """Return options by our names and values.

    Raises StartupError for an unknown option.
    """
    known = {field.name for field in fields(EngineOptions)}
    options: dict[str, object] = {}
    overrides: dict[str, object] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in known:
            if own == "task" and options.get("task") in (None, "pooling"):
                options.pop("task", None)
            if own == "task" and "task" in options and own_value(own, value) in (None, "pooling"):
                continue
            if own in options:
                raise StartupError(f"{name} and another name of {own} cannot be used together.")
            options[own] = own_value(own, value)
            if own == "executor" and value == "mp":
                ranks = str(given.get("tensor_parallel_size") or 1)
                options[own] = "local" if ranks == "1" else "ray"
        elif name in OVERRIDES:
            overrides |= {} if value is None else {name: value}
        elif reason := ignored_reason(name, value):
            logger.log(notice_level(name), "%s has no effect: %s.", name, reason)
        elif not is_our_behavior(name, value):
            raise StartupError(_rejection(name, known))
    if overrides:
        others = options.get("hf_overrides") or {}
        options["hf_overrides"] = {**others, **overrides} if isinstance(others, dict) else others
    return options


def own_value(name: str, value: object) -> object:
    """Return vLLM's value of one of our options as ours."""
    if name in _COUNTS:
        if isinstance(value, str):
            return token_count(value, name)
        return None if value == -1 else value
    if name in _OBJECTS and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    if isinstance(value, str):
        return _VALUES.get(name, {}).get(value, value)
    return value


def token_count(text: str, name: str) -> int | None:
    """Return a number of tokens such as 32768, 32K (1024 each) or 32k; None for `auto`.

    Raises StartupError.
    """
    if text in ("auto", "-1"):
        return None
    found = _LENGTH.fullmatch(text)
    number = float(found[1]) * _UNITS[found[2]] if found else 0.5
    if not number.is_integer():
        raise StartupError(
            f"{name} must be a number of tokens such as 32768, 32K or auto, not {quote(text)}."
        )
    return int(number)


def notice_level(name: str) -> int:
    """Return the level at which the log says that an option has no effect."""
    # Users who set these expect more than speed.
    is_missed = name == "trust_remote_code" or name.startswith("spec")
    return logging.WARNING if is_missed else logging.INFO


def _rejection(name: str, known: set[str]) -> str:
    if name in REJECTED:
        return f"{name} is not supported: {REJECTED[name]}."
    nearest = nearest_name(name, known | ALIASES.keys())
    return f"{name} is not an option{'.' if nearest is None else f'; did you mean {nearest}?'}"

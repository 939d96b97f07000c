"""Engine options under vLLM's names and values, for programs and commands written for it."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields
from typing import TYPE_CHECKING

from cluster.engine.options import EngineOptions, refuse_remote_code
from pagedray.errors import StartupError
from pagedray.shown_value import shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ALIASES", "IGNORED", "REFUSED", "context_length", "own_options", "own_value"]

ALIASES: Mapping[str, str] = {
    "distributed_executor_backend": "executor",
    "enable_prefix_caching": "enable_prefix_cache",
    "gpu_memory_utilization": "memory_fraction",
}
"""vLLM's names of our options."""

IGNORED: Mapping[str, str] = {
    "disable_custom_all_reduce": "all_reduce selects how rows are summed",
    "disable_log_requests": "texts of requests are never logged",
    "disable_log_stats": "statistics are metrics",
    "enable_log_requests": "texts of requests are never logged",
    "kv_offloading_backend": "prefixes are kept in the CPU blocks",
    "kv_offloading_size": "num_cpu_blocks sets the blocks for prefixes",
    "max_seq_len_to_capture": "max_graph_tokens limits the graphs of prompts",
    "swap_space": "num_cpu_blocks sets the blocks for swapping and for prefixes",
}
"""Options that cannot change a token, and what there is instead."""

WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "download_dir": (None,),
    "enable_chunked_prefill": (None, True),
    "enable_lora": (None, False),
    "hf_overrides": (None, {}),
    "pipeline_parallel_size": (1,),
    "revision": (None,),
    "skip_tokenizer_init": (False,),
    "speculative_config": (None,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "trust_remote_code": (False,),
}
"""Options that we do not have, and their values without effect."""

REFUSED: Mapping[str, str] = {
    "chat_template": "write chat_template.jinja in the folder of the model",
    "cpu_offload_gb": "use more ranks with tensor_parallel_size",
    "data_parallel_size": "use num_replicas of Ray Serve",
    "download_dir": "set HF_HOME",
    "enable_chunked_prefill": "long prompts are always computed in chunks",
    "enable_lora": "merge the adapter into the weights",
    "hf_overrides": "edit config.json in the folder of the model",
    "pipeline_parallel_size": "use tensor_parallel_size",
    "revision": "name it in the model: ORG/NAME@REVISION",
    "skip_tokenizer_init": "the server needs the model's tokenizer",
    "speculative_config": "speculative decoding is not available",
    "tokenizer": "the tokenizer is that of the model's folder",
    "tokenizer_mode": "the tokenizer is tokenizer.json of the model's folder",
    "tokenizer_revision": "the tokenizer is that of the model",
}
"""What to use instead of options that we do not have."""

_VALUES: Mapping[str, Mapping[object, object]] = {
    "dtype": {"auto": None, "half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "load_format": {"safetensors": "auto"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
    "executor": {"mp": "local", "uni": "local"},
}
"""vLLM's values of our options."""
_LENGTH = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([kKmMgG]?)")
_UNITS = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


def own_options(given: Mapping[str, object]) -> dict[str, object]:
    """Return options by our names and values. Raises StartupError for one that we do not have."""
    if given.get("trust_remote_code"):
        refuse_remote_code(given)
    known = {field.name for field in fields(EngineOptions)}
    options: dict[str, object] = {}
    for name, value in given.items():
        own = ALIASES.get(name, name)
        if own in known:
            if own in options:
                raise StartupError(f"{name} and another name of {own} cannot be used together.")
            options[own] = own_value(own, value)
        elif name not in IGNORED and value not in WITHOUT_EFFECT.get(name, ()):
            raise StartupError(_refusal(name, value, known))
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


def _refusal(name: str, value: object, known: set[str]) -> str:
    if name in REFUSED:
        return f"{name} = {shown_value(value)} is not supported: {REFUSED[name]}."
    nearest = difflib.get_close_matches(name, known | ALIASES.keys(), n=1, cutoff=0.75)
    return f"{name} is not an option{f'; did you mean {nearest[0]}?' if nearest else '.'}"

"""The options of an engine, and the engine configuration that they make."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from pagedray.config import (
    AllReduce,
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    MessageSpecialTokens,
    ParallelConfig,
    PlacementStrategy,
    Preemption,
    SchedulerConfig,
)
from pagedray.errors import CheckpointError, StartupError
from workers.models.registry import check_parallel, read_model_config

__all__ = ["EngineOptions", "engine_config"]

Config = TypeVar("Config", CacheConfig, ParallelConfig, SchedulerConfig)

# Any: a dataclass field does not state the type of its default.
_DEFAULTS: dict[str, Any] = {
    field.name: field.default
    for config in (CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig)
    for field in fields(config)
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of an engine; `pagedray serve --help` explains each.

    A device or dtype of None is chosen for the machine and the checkpoint.
    """

    tensor_parallel_size: int = _DEFAULTS["tensor_parallel_size"]
    device: Device | None = None
    dtype: Dtype | None = None
    executor: Literal["ray", "local"] = _DEFAULTS["executor"]
    num_threads: int | None = _DEFAULTS["num_threads"]
    placement_strategy: PlacementStrategy = _DEFAULTS["placement_strategy"]
    spare_ranks: int | None = _DEFAULTS["spare_ranks"]
    all_reduce: AllReduce = _DEFAULTS["all_reduce"]
    allow_unauthenticated_ray: bool = _DEFAULTS["allow_unauthenticated_ray"]
    block_size: int = _DEFAULTS["block_size"]
    num_blocks: int | None = _DEFAULTS["num_blocks"]
    num_cpu_blocks: int | None = _DEFAULTS["num_cpu_blocks"]
    memory_fraction: float = _DEFAULTS["memory_fraction"]
    enable_prefix_cache: bool = _DEFAULTS["enable_prefix_cache"]
    kv_cache_dtype: KVCacheDtype = _DEFAULTS["kv_cache_dtype"]
    max_num_seqs: int = _DEFAULTS["max_num_seqs"]
    max_num_batched_tokens: int = _DEFAULTS["max_num_batched_tokens"]
    max_model_len: int | None = _DEFAULTS["max_model_len"]
    max_queued_requests: int = _DEFAULTS["max_queued_requests"]
    max_queued_tokens: int = _DEFAULTS["max_queued_tokens"]
    preemption: Preemption = _DEFAULTS["preemption"]
    load_format: LoadFormat = _DEFAULTS["load_format"]
    attention_backend: str = _DEFAULTS["attention_backend"]
    enforce_eager: bool = _DEFAULTS["enforce_eager"]
    max_graph_tokens: int = _DEFAULTS["max_graph_tokens"]
    load_seed: int = _DEFAULTS["load_seed"]
    structure_compile_s: float = _DEFAULTS["structure_compile_s"]
    message_special_tokens: MessageSpecialTokens = _DEFAULTS["message_special_tokens"]


def engine_config(model: str | Path, options: EngineOptions) -> EngineConfig:
    """Return the configuration of an engine for the checkpoint in the folder `model`.

    Reads no tensor of the checkpoint. Raises StartupError.
    """
    options = replace(options, device=options.device or _default_device())
    model_config = read_model_config(Path(model), dtype=options.dtype)
    if options.device == "cpu" and model_config.dtype == "float16":
        raise StartupError(
            "dtype float16 is not supported on the CPU; use --dtype bfloat16 or float32."
        )
    parallel = _config_from(ParallelConfig, options)
    check_parallel(model_config, parallel.tensor_parallel_size)
    if options.max_model_len is not None and options.max_model_len > model_config.max_positions:
        raise CheckpointError(
            f"max_model_len {options.max_model_len} is more than the "
            f"{model_config.max_positions} positions of {model_config.name}."
        )
    return EngineConfig(
        model=model_config,
        cache=_config_from(CacheConfig, options),
        scheduler=_config_from(SchedulerConfig, options),
        parallel=parallel,
        load_format=options.load_format,
        attention_backend=options.attention_backend,
        enforce_eager=options.enforce_eager,
        max_graph_tokens=options.max_graph_tokens,
        load_seed=options.load_seed,
        structure_compile_s=options.structure_compile_s,
        message_special_tokens=options.message_special_tokens,
    )


def _config_from(kind: type[Config], options: EngineOptions) -> Config:
    """Return a configuration whose every field is an option of the same name."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(kind)})


def _default_device() -> Device:
    # Asking torch would cost seconds in a process that may never need it.
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"

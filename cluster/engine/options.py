"""What a user may set about an engine, and the engine configuration that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pagedray.config import (
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    KVCacheDtype,
    LoadFormat,
    ParallelConfig,
    PlacementStrategy,
    Preemption,
    SchedulerConfig,
)
from pagedray.errors import CheckpointError, StartupError
from workers.models.registry import check_parallel, read_model_config

__all__ = ["EngineOptions", "engine_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The knobs of an engine; None chooses. `pagedray serve --help` explains each."""

    tensor_parallel_size: int = 1
    device: Device | None = None
    dtype: Dtype | None = None
    executor: Literal["ray", "local"] = "ray"
    num_threads: int | None = None
    placement_strategy: PlacementStrategy = "STRICT_PACK"
    block_size: int = 16
    num_blocks: int | None = None
    num_cpu_blocks: int | None = None
    memory_fraction: float = 0.9
    enable_prefix_cache: bool = True
    kv_cache_dtype: KVCacheDtype = "auto"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int = 2**20
    preemption: Preemption = "auto"
    load_format: LoadFormat = "auto"
    attention_backend: str = "auto"
    enforce_eager: bool = False
    load_seed: int = 0
    structure_compile_s: float = 10.0


def engine_config(model: str | Path, options: EngineOptions) -> EngineConfig:
    """Return the configuration of an engine for the checkpoint in the folder `model`.

    Reads the checkpoint's description, none of its tensors. Raises StartupError.
    """
    device = options.device or _device_at_hand()
    model_config = read_model_config(Path(model), dtype=options.dtype)
    if device == "cpu" and model_config.dtype == "float16":
        raise StartupError(
            "dtype float16 is not to be had on the cpu, which has no arithmetic for it; "
            "use bfloat16 or float32."
        )
    parallel = ParallelConfig(
        tensor_parallel_size=options.tensor_parallel_size,
        device=device,
        executor=options.executor,
        num_threads=options.num_threads,
        placement_strategy=options.placement_strategy,
    )
    check_parallel(model_config, parallel.tensor_parallel_size)
    if options.max_model_len is not None and options.max_model_len > model_config.max_positions:
        raise CheckpointError(
            f"max model len {options.max_model_len} is more than the "
            f"{model_config.max_positions} positions of {model_config.name}."
        )
    return EngineConfig(
        model=model_config,
        cache=CacheConfig(
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            num_cpu_blocks=options.num_cpu_blocks,
            memory_fraction=options.memory_fraction,
            enable_prefix_cache=options.enable_prefix_cache,
            kv_cache_dtype=options.kv_cache_dtype,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_model_len=options.max_model_len,
            max_queued_requests=options.max_queued_requests,
            max_queued_tokens=options.max_queued_tokens,
            preemption=options.preemption,
        ),
        parallel=parallel,
        load_format=options.load_format,
        attention_backend=options.attention_backend,
        enforce_eager=options.enforce_eager,
        load_seed=options.load_seed,
        structure_compile_s=options.structure_compile_s,
    )


def _device_at_hand() -> Device:
    # Asking torch would cost seconds in a process that may never need it.
    return "cuda" if Path("/dev/nvidiactl").exists() else "cpu"

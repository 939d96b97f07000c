"""The keyword arguments of `LLM`, for editors and type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

if TYPE_CHECKING:
    from pagedray.config import (
        AllReduce,
        Device,
        MessageSpecialTokens,
        PlacementStrategy,
        Preemption,
    )
    from pagedray.model_config import Task

__all__ = ["LLMOptions"]


class LLMOptions(TypedDict, total=False):
    """The engine's options, by our names and by vLLM's.

    `pagedray serve --help` explains each of ours, with its default.
    """

    tensor_parallel_size: int
    """Number of ranks, one per device, that the model is sharded over."""
    device: Device | None
    """None selects a GPU if there is one."""
    dtype: (
        Literal["auto", "half", "fp16", "float16", "bf16", "bfloat16", "float", "fp32", "float32"]
        | None
    )
    """Data type of weights and activations; None and `auto` use that of the checkpoint."""
    task: Task | Literal["pooling"] | None
    runner: Literal["auto", "generate", "pooling"]
    """The same as `task`; `pooling` embeds or scores, whichever the model is for."""
    convert: Literal["auto", "none", "embed"]
    """The same as `task`."""
    quantization: (
        Literal["fp8", "compressed-tensors", "gptq", "awq", "gptq_marlin", "awq_marlin"] | None
    )
    """`fp8` quantizes plain weights while they are loaded; None reads it from the checkpoint."""
    enable_expert_parallel: bool
    """Whether each rank has some whole experts, instead of some columns of every expert."""
    executor: Literal["ray", "local"]
    """`ray` runs each rank as a Ray actor; `local` runs a single rank in this process."""
    num_threads: int | None
    """CPU threads per rank."""
    placement_strategy: PlacementStrategy
    spare_ranks: int | None
    all_reduce: AllReduce
    allow_unauthenticated_ray: bool
    block_size: int
    """Tokens per block."""
    num_blocks: int | None
    """Number of blocks on the device; None is as many as fit in memory."""
    num_cpu_blocks: int | None
    """Number of CPU blocks, for swapping and for prefixes evicted from the device."""
    memory_fraction: float
    """Fraction of device memory for weights, activations and KV cache."""
    enable_prefix_cache: bool
    enable_cpu_prefix_cache: bool
    """Keep prefixes that are evicted from the device in CPU blocks."""
    enable_kept_cpu_pool: bool
    """Keep the CPU blocks when ranks are replaced, so that the new ranks reuse their prefixes."""
    cpu_pool_checksums: bool
    """When a rank is replaced, drop CPU blocks whose checksum does not match."""
    disk_cache_folder: str
    """Folder for files of prefixes evicted from the CPU blocks."""
    disk_cache_bytes: int
    """Maximum size of these files, for all ranks together."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    max_num_seqs: int | None
    """Maximum number of sequences per step (256, or 1024 on GPUs of 70 GiB or more)."""
    max_num_batched_tokens: int | None
    """Maximum number of tokens per step (2048, or 8192 on GPUs of 70 GiB or more)."""
    max_model_len: int | str | None
    """Context length in tokens, such as 32768, `32K` or `auto`."""
    max_queued_requests: int
    max_queued_tokens: int
    preemption: Preemption
    itl_target_ms: float | None
    """Target for the time between tokens while prompts are processed; None is no limit."""
    load_format: Literal["auto", "dummy", "safetensors"]
    attention_backend: str
    enforce_eager: bool
    """Disable CUDA graphs."""
    max_graph_tokens: int
    load_seed: int
    structure_compile_s: float
    message_special_tokens: MessageSpecialTokens
    chat_template: str | None
    """A file, or the text, of a chat template that replaces the model's."""
    trust_request_chat_template: bool
    """Only affects servers; `chat` always accepts a template."""
    generation_config: str
    """`auto`, `none`, or a folder whose generation_config.json has the default parameters."""
    override_generation_config: dict[str, object] | None
    """Default parameters that take precedence over generation_config.json."""
    revision: str | None
    """Branch, tag or commit of a model on the Hub."""
    tokenizer: str | None
    """Must be the model."""
    tokenizer_revision: str | None
    """Must be the revision of the model."""
    download_dir: str | None
    """Folder of the Hub's cache on each node."""
    hf_overrides: dict[str, object] | None
    """Fields that replace those of config.json."""

    gpu_memory_utilization: float
    """The same as `memory_fraction`."""
    enable_prefix_caching: bool
    """The same as `enable_prefix_cache`."""
    distributed_executor_backend: Literal["ray", "mp", "uni"]
    """The same as `executor`; `uni` selects `local`, and so does `mp` for a single rank."""
    rope_scaling: dict[str, object] | None
    """The same as this field of `hf_overrides`."""
    rope_theta: float | None
    """The same as this field of `hf_overrides`."""
    trust_remote_code: bool
    """Ignored, with a warning: code from checkpoints is never run."""
    swap_space: float
    """Ignored; `num_cpu_blocks` sets the blocks for swapping."""
    disable_log_stats: bool
    """Ignored."""

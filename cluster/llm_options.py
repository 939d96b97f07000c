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
    """Ranks, one per device, that share the model."""
    device: Device | None
    """None is a GPU if there is one."""
    dtype: Literal["auto", "half", "float", "float32", "bfloat16", "float16"] | None
    """Of weights and activations; None and `auto` are the checkpoint's."""
    task: Task | None
    quantization: (
        Literal["fp8", "compressed-tensors", "gptq", "awq", "gptq_marlin", "awq_marlin"] | None
    )
    """`fp8` quantizes plain weights when they are loaded; None is as the checkpoint says."""
    enable_expert_parallel: bool
    """Whether each rank has whole experts, instead of some columns of each."""
    executor: Literal["ray", "local"]
    """`ray` runs each rank as an actor, `local` one rank in this process."""
    num_threads: int | None
    """CPU threads per rank."""
    placement_strategy: PlacementStrategy
    spare_ranks: int | None
    all_reduce: AllReduce
    allow_unauthenticated_ray: bool
    block_size: int
    """Tokens per block."""
    num_blocks: int | None
    """Blocks on the device; None is as many as fit in memory."""
    num_cpu_blocks: int | None
    """CPU blocks for swapping and for prefixes."""
    memory_fraction: float
    """Fraction of device memory for weights, activations and KV cache."""
    enable_prefix_cache: bool
    enable_cpu_prefix_cache: bool
    """Keep prefixes that have no room on the device in the CPU blocks."""
    enable_kept_cpu_pool: bool
    """Have the CPU blocks outlive the ranks, so that new ones find the prefixes there."""
    cpu_pool_checksums: bool
    """Compare CPU blocks that outlived a rank with checksums."""
    disk_cache_folder: str
    """Keep prefixes that the CPU blocks have no room for in files in this folder."""
    disk_cache_bytes: int
    """Most bytes that all ranks together keep there."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
    max_num_seqs: int | None
    """Maximum number of sequences per step (256, or 1024 on GPUs of 70 GiB or more)."""
    max_num_batched_tokens: int
    """Maximum number of tokens per step."""
    max_model_len: int | str | None
    """Context length in tokens, such as 32768, `32K` or `auto`."""
    max_queued_requests: int
    max_queued_tokens: int
    preemption: Preemption
    itl_target_ms: float | None
    """Time between tokens that prompts should not exceed; None is any."""
    load_format: Literal["auto", "dummy", "safetensors"]
    attention_backend: str
    enforce_eager: bool
    """Disable CUDA graphs."""
    max_graph_tokens: int
    load_seed: int
    structure_compile_s: float
    message_special_tokens: MessageSpecialTokens
    trust_request_chat_template: bool
    """For servers; conversations of `chat` are rendered by the model's template."""
    generation_config: str
    """`auto`, `none`, or a folder whose generation_config.json has the default parameters."""

    gpu_memory_utilization: float
    """The same as `memory_fraction`."""
    enable_prefix_caching: bool
    """The same as `enable_prefix_cache`."""
    distributed_executor_backend: Literal["ray", "mp", "uni"]
    """The same as `executor`; `mp` and `uni` are `local`."""
    trust_remote_code: Literal[False]
    tokenizer: None
    revision: None
    swap_space: float
    """Ignored; `num_cpu_blocks` sets the blocks for swapping."""
    disable_log_stats: bool
    """Ignored."""

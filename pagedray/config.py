"""What an engine is made of: frozen records, read and validated once.

This module knows the words, not where they come from: checkpoints are read in
`workers.models.registry`, command lines in `cluster.cli`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagedray.errors import StartupError

__all__ = [
    "CacheConfig",
    "Device",
    "Dtype",
    "EngineConfig",
    "LoadFormat",
    "ModelConfig",
    "ParallelConfig",
    "Preemption",
    "RopeConfig",
    "SchedulerConfig",
]

Device = Literal["cuda", "cpu"]
Dtype = Literal["float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
Preemption = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How rotary position embeddings are scaled."""

    kind: Literal["default", "linear", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder, whatever its family calls the numbers."""

    name: str
    """The name that clients ask for."""
    folder: Path
    """Where the checkpoint lies."""
    architecture: str
    """The checkpoint's own word for its family, such as `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_positions: int
    norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    has_tied_embeddings: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Keys a query may see, itself included, per layer; None is all of them."""
    dtype: Dtype = "bfloat16"
    """The type of weights and activations."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.sliding_windows:
            return
        if len(self.sliding_windows) != self.num_layers:
            raise StartupError(
                f"sliding_windows has {len(self.sliding_windows)} entries "
                f"for {self.num_layers} layers."
            )

    def sliding_window(self, layer: int) -> int | None:
        """Return how many keys a query of `layer` may see, or None for all of them."""
        return self.sliding_windows[layer] if self.sliding_windows else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How the KV cache is laid out on one rank."""

    block_size: int = 16
    """Tokens per block."""
    num_blocks: int | None = None
    """Blocks in the device pool; None is as many as the memory holds."""
    num_cpu_blocks: int | None = None
    """Blocks in the CPU pool that preempted sequences are swapped to; None chooses."""
    memory_fraction: float = 0.9
    """Part of the device's memory that weights, activations and cache may take together."""
    enable_prefix_cache: bool = True
    """Whether full blocks are shared between sequences that begin with the same tokens."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size > 256:
            raise StartupError(f"block size {self.block_size} is not allowed; use 1 to 256.")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise StartupError(f"num blocks {self.num_blocks} is not allowed; use 2 or more.")
        if self.num_cpu_blocks is not None and self.num_cpu_blocks < 0:
            raise StartupError(
                f"num cpu blocks {self.num_cpu_blocks} is not allowed; use 0 or more."
            )
        if not 0.0 < self.memory_fraction <= 1.0:
            raise StartupError(
                f"memory fraction {self.memory_fraction} is not allowed; use above 0, at most 1."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What one step may hold and how many requests may wait."""

    max_num_seqs: int = 256
    """Sequences that run in one step at most."""
    max_num_batched_tokens: int = 2048
    """Tokens of one step at most: its token budget."""
    max_model_len: int | None = None
    """Tokens of a sequence, prompt and continuation; None is what the model was made for."""
    max_queued_requests: int = 1024
    """Requests that may wait; one more is refused."""
    preemption: Preemption = "auto"
    """How a sequence makes room: swapped to the CPU pool, recomputed later, or swapped while
    there is room."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests"):
            value = getattr(self, name)
            if value < 1:
                raise StartupError(
                    f"{name.replace('_', ' ')} {value} is not allowed; use 1 or more."
                )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise StartupError(f"max model len {self.max_model_len} is not allowed; use 2 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Which ranks hold the model and how they are driven."""

    tensor_parallel_size: int = 1
    """Ranks in the group."""
    device: Device = "cpu"
    executor: Literal["ray", "local"] = "ray"
    num_threads: int | None = None
    """CPU threads of a rank on the CPU; None shares the cores out."""

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1:
            raise StartupError(
                f"tensor parallel size {self.tensor_parallel_size} is not allowed; use 1 or more."
            )
        if self.executor == "local" and self.tensor_parallel_size > 1:
            raise StartupError(
                f"the local executor runs one rank, not {self.tensor_parallel_size}; "
                "use the ray executor."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One replica: a model, its cache, its scheduler and its ranks."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    load_format: LoadFormat = "auto"
    """`dummy` fills the weights with random numbers and reads no tensor."""
    attention_backend: str = "auto"
    seed: int = 0
    """Seed of dummy weights."""

    @property
    def max_model_len(self) -> int:
        """The most tokens that a sequence may have, prompt and continuation."""
        return self.scheduler.max_model_len or self.model.max_positions

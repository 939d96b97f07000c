"""The configuration of an engine: frozen records, validated when they are created.

Command lines are read in `cluster.cli.parser`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from pagedray.errors import StartupError
from pagedray.model_config import DraftHeadConfig, ModelConfig

__all__ = [
    "LARGE_LIMITS",
    "MOST_SPARE_STATES",
    "AllReduce",
    "CacheConfig",
    "CacheSize",
    "Device",
    "EngineConfig",
    "KVCacheDtype",
    "KernelReport",
    "LoadFormat",
    "MatrixDtype",
    "MessageSpecialTokens",
    "ParallelConfig",
    "PlacementStrategy",
    "Preemption",
    "QuantizationMethod",
    "SchedulerConfig",
    "SpeculationConfig",
    "SpeculationMethod",
    "StepLimits",
]

Device = Literal["cuda", "cpu"]
KVCacheDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2"]
MatrixDtype = Literal["auto", "float32", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]
MessageSpecialTokens = Literal["text", "parse"]
PlacementStrategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
AllReduce = Literal["auto", "nccl"]
Preemption = Literal["auto", "swap", "recompute"]
QuantizationMethod = Literal["fp8", "compressed-tensors", "gptq", "awq"]
SpeculationMethod = Literal["ngram", "suffix", "eagle3", "mtp", "draft_model"]


MOST_SPARE_STATES = 8
"""The most states that a step saves within its chunks."""
_MOST_THREADS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The limits of a step; the defaults suit all devices but large GPUs."""

    max_num_seqs: int = 256
    """Maximum number of sequences in a step."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens in a step."""

    @property
    def num_spare_states(self) -> int:
        """Recurrent states that a step may save within its chunks, a power of two."""
        return 1 << (min(self.max_num_seqs, MOST_SPARE_STATES).bit_length() - 1)


LARGE_LIMITS = StepLimits(max_num_seqs=1024, max_num_batched_tokens=8192)
"""The limits of GPUs of 70 GiB or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The size of both block pools, of one rank or of a group."""

    num_blocks: int
    num_cpu_blocks: int
    block_bytes: int
    """Bytes of one block of all layers; of a group, on all its ranks together."""
    limits: StepLimits = StepLimits()
    """The limits of steps, for which the pools leave memory."""
    groups: tuple[int | None, ...] = (None,)
    """The window of each group of layers with a block table of its own; None sees all tokens."""
    state_blocks: int = 0
    """Blocks that hold the recurrent states of a sequence; 0 if no layer has a recurrent state."""
    state_grid: int = 64
    """States are kept, and chunks of prompts end, at multiples of this number of tokens."""


@dataclass(frozen=True, slots=True)
class KernelReport:
    """Which kernels compute a model."""

    backend: str
    """The name of the attention backend, never `auto`."""
    providers: dict[str, dict[str, int]]
    """Number of layers that each provider of attention kernels computes, by part of a step."""
    replaced: tuple[str, ...] = ()
    """Kernels of matrix products that do not compile and are replaced by slower kernels."""

    @property
    def attention(self) -> str:
        """The attention backend, with the providers of its kernels if they have other names."""
        names = {name for counts in self.providers.values() for name in counts} - {self.backend}
        return f"{self.backend} ({', '.join(sorted(names))} kernels)" if names else self.backend


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache of one rank."""

    block_size: int = 16
    """Tokens per block."""
    num_blocks: int | None = None
    """Blocks in the device pool; None is as many as fit in memory."""
    num_cpu_blocks: int | None = None
    """Blocks in the CPU pool, for swapped-out sequences and prefixes.

    None is 1 GiB on a CPU; with GPUs it is a quarter of the available host memory for all ranks.
    """
    memory_fraction: float = 0.9
    """Fraction of device memory for weights, activations and cache together."""
    enable_prefix_cache: bool = True
    """Whether sequences with a common prefix share its full blocks."""
    enable_cpu_prefix_cache: bool = True
    """Whether prefixes that have no room on the device are kept in the CPU pool."""
    disk_cache_folder: str | None = None
    """Folder in which each rank keeps prefixes evicted from the CPU pool; None disables this."""
    disk_cache_bytes: int | None = None
    """Maximum number of bytes that all ranks together keep there."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """The dtype of keys and values; `auto` is the model's."""
    mamba_ssm_cache_dtype: MatrixDtype = "auto"
    """The dtype of the matrices of recurrent layers; `auto` is the checkpoint's."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 256:
            raise StartupError(f"block_size must be from 1 to 256, not {self.block_size}.")
        _check_at_least("num_blocks", self.num_blocks, 2)
        _check_at_least("num_cpu_blocks", self.num_cpu_blocks, 0)
        if not 0.0 < self.memory_fraction <= 1.0:
            raise StartupError(
                f"memory_fraction must be above 0 and at most 1, not {self.memory_fraction}."
            )
        _check_at_least("disk_cache_bytes", self.disk_cache_bytes, 1)
        if (self.disk_cache_folder is None) != (self.disk_cache_bytes is None):
            raise StartupError("disk_cache_folder and disk_cache_bytes must be set together.")
        if self.disk_cache_folder is not None and not self.has_cpu_cache:
            raise StartupError("disk_cache_folder needs the prefix cache, and blocks on the CPU.")

    @property
    def has_cpu_cache(self) -> bool:
        """Whether the CPU pool keeps prefixes, unless the host has no memory for it."""
        is_enabled = self.enable_prefix_cache and self.enable_cpu_prefix_cache
        return is_enabled and self.num_cpu_blocks != 0

    def num_disk_blocks(self, block_bytes: int) -> int:
        """Return how many blocks the disk may hold, of this many bytes on all ranks together."""
        return 0 if self.disk_cache_bytes is None else self.disk_cache_bytes // block_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits of a step and of the queue."""

    max_num_seqs: int | None = None
    """Maximum number of sequences in a step; None is 256, or 1024 on GPUs of 70 GiB or more."""
    max_num_batched_tokens: int | None = None
    """Token budget of a step; None is 2048, or 8192 on GPUs of 70 GiB or more."""
    max_model_len: int | None = None
    """Maximum length of prompt and completion; None is the context length of the model."""
    max_queued_requests: int = 1024
    """Maximum number of waiting requests."""
    max_queued_tokens: int = 2**20
    """Maximum number of waiting prompt tokens; a tenant's only request may exceed it."""
    preemption: Preemption = "auto"
    """How a sequence is preempted: swapped to the CPU pool, recomputed later, or the cheaper."""
    itl_target_ms: float | None = None
    """Target for the duration of a step with running sequences; None is no limit."""

    def __post_init__(self) -> None:
        _check_at_least("max_num_seqs", self.max_num_seqs, 1)
        for name in (
            "max_num_batched_tokens",
            "max_queued_requests",
            "max_queued_tokens",
        ):
            _check_at_least(name, getattr(self, name), 1)
        _check_at_least("max_model_len", self.max_model_len, 2)
        if self.itl_target_ms is not None and not 0.0 < self.itl_target_ms < math.inf:
            raise StartupError(
                f"itl_target_ms must be above 0 and finite, not {self.itl_target_ms}."
            )

    def limits(self, chosen: StepLimits | None = None) -> StepLimits:
        """Return the limits of a step: limits set by options, others as chosen or by default."""
        others = StepLimits() if chosen is None else chosen
        return StepLimits(
            max_num_seqs=self.max_num_seqs or others.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or others.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """How the next tokens of sequences are guessed, for steps to verify several at once."""

    num_speculative_tokens: int
    """Maximum number of guessed tokens of a sequence in a step."""
    method: SpeculationMethod = "ngram"
    """`ngram` guesses that a sequence goes on as after an earlier occurrence of its last tokens.
    `suffix` also looks for these in past answers of the tenant.
    `eagle3` has a draft head guess from the hidden states of the model, `mtp` the layer of the
    model that predicts several tokens, and `draft_model` a smaller model."""
    prompt_lookup_min: int = 2
    """Minimum number of these tokens."""
    prompt_lookup_max: int = 4
    """Maximum number of these tokens; longer matches are preferred."""
    suffix_decoding_max_tree_depth: int = 24
    """Maximum number of last tokens that `suffix` looks for."""
    suffix_decoding_max_cached_requests: int = 10_000
    """Maximum number of past answers that `suffix` keeps."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Maximum number of guesses of `suffix`, over the number of last tokens that were found."""
    suffix_decoding_min_token_prob: float = 0.1
    """How often tokens must have followed, of all places, for `suffix` to guess them."""

    def __post_init__(self) -> None:
        for name, low in (
            ("num_speculative_tokens", 1),
            ("prompt_lookup_min", 1),
            ("prompt_lookup_max", 1),
            ("suffix_decoding_max_tree_depth", 2),
            ("suffix_decoding_max_cached_requests", 0),
        ):
            _check_at_least(name, getattr(self, name), low)
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise StartupError(
                f"prompt_lookup_max must be at least prompt_lookup_min, "
                f"{self.prompt_lookup_min}, not {self.prompt_lookup_max}."
            )
        for name, high in (
            ("suffix_decoding_max_spec_factor", 100.0),
            ("suffix_decoding_min_token_prob", 1.0),
        ):
            if not 0.0 <= getattr(self, name) <= high:
                raise StartupError(f"{name} must be from 0 to {high:g}, not {getattr(self, name)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of a replica and the executor that drives them."""

    tensor_parallel_size: int = 1
    """Number of ranks, over which the model is sharded."""
    enable_expert_parallel: bool = False
    """Whether each rank has whole experts, instead of some columns of each."""
    device: Device = "cpu"
    executor: Literal["ray", "local"] = "ray"
    num_threads: int | None = None
    """CPU threads per rank; None is an equal share of the cores."""
    placement_strategy: PlacementStrategy = "STRICT_PACK"
    """The strategy of Ray's placement group; STRICT_PACK is a single node."""
    spare_ranks: int | None = None
    """Processes that wait on each node to replace a rank that dies; None is 1 on GPUs, else 0."""
    all_reduce: AllReduce = "auto"
    """How rows are summed over GPUs; auto uses one kernel if GPUs of a node have peer access."""
    allow_unauthenticated_ray: bool = False
    """Whether RAY_AUTH_MODE=disabled may turn off the token of a Ray that is started for this."""

    def __post_init__(self) -> None:
        _check_at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _check_at_least("spare_ranks", self.spare_ranks, 0)
        if self.num_threads is not None and not 1 <= self.num_threads <= _MOST_THREADS:
            raise StartupError(
                f"num_threads must be from 1 to {_MOST_THREADS}, not {self.num_threads}."
            )
        if self.executor == "local" and self.tensor_parallel_size > 1:
            raise StartupError(
                f"The local executor runs one rank, but tensor_parallel_size is "
                f"{self.tensor_parallel_size}; use the ray executor."
            )

    @property
    def num_spare_ranks(self) -> int:
        """Spare processes on each node."""
        if self.spare_ranks is not None:
            return self.spare_ranks
        return 1 if self.device == "cuda" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The configuration of one replica."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculation: SpeculationConfig | None = None
    """None computes one token of a sequence after the other."""
    drafter: DraftHeadConfig | ModelConfig | None = None
    """The draft head on the ranks, of the methods `eagle3` and `mtp`, or their draft model."""
    load_format: LoadFormat = "auto"
    """`dummy` initializes random weights and reads no tensor."""
    attention_backend: str = "auto"
    enforce_eager: bool = False
    """Whether CUDA graphs are disabled: slower decoding, less memory."""
    max_graph_tokens: int = 2048
    """Maximum tokens of a step with prompts that uses CUDA graphs; 0 disables these graphs."""
    load_seed: int = 0
    """Random seed of dummy weights."""
    structure_compile_s: float = 10.0
    """CPU time limit for compiling one JSON schema, regular expression or grammar."""
    message_special_tokens: MessageSpecialTokens = "text"
    """Whether special tokens that clients write in messages are text, or parsed as such."""
    chat_template: str | None = None
    """A file, or the text, of a chat template that replaces the model's."""
    trust_request_chat_template: bool = False
    """Whether requests may bring a chat template of their own."""
    sampling_defaults: tuple[tuple[str, float], ...] = ()
    """Names and values of sampling parameters for requests that do not set them."""
    seed: int | None = None
    """Makes the seeds of requests without a seed; None is random."""

    def __post_init__(self) -> None:
        _check_at_least("max_graph_tokens", self.max_graph_tokens, 0)
        if not 0.0 < self.structure_compile_s <= 60.0:
            raise StartupError(
                f"structure_compile_s must be above 0 and at most 60, "
                f"not {self.structure_compile_s}."
            )
        if self.model.pools and self.cache.disk_cache_folder:
            raise StartupError(
                f"disk_cache_folder has no effect on {self.model.name}, which embeds or scores "
                "texts and keeps no KV blocks; remove it."
            )
        if self.scheduler.preemption == "swap" and self.cache.num_cpu_blocks == 0:
            raise StartupError("preemption swap needs CPU blocks, but num_cpu_blocks is 0.")

    @property
    def max_model_len(self) -> int:
        """The maximum length of prompt and completion."""
        return self.scheduler.max_model_len or self.model.max_positions

    @property
    def max_num_seqs(self) -> int:
        """The maximum number of sequences in a step; ranks may choose a larger number."""
        return self.scheduler.limits().max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """The token budget of a step; ranks may choose a larger budget."""
        return self.scheduler.limits().max_num_batched_tokens

    @property
    def num_states(self) -> int:
        """The number of states of rows and of spare states, for models with recurrent states."""
        limits = self.scheduler.limits()
        num_spares = limits.num_spare_states if self.cache.enable_prefix_cache else 0
        return limits.max_num_seqs + num_spares

    def with_limits(self, chosen: StepLimits) -> EngineConfig:
        """Return the configuration with limits that the ranks have chosen where none are set."""
        limits = self.scheduler.limits(chosen)
        return replace(
            self,
            scheduler=replace(
                self.scheduler,
                max_num_seqs=limits.max_num_seqs,
                max_num_batched_tokens=limits.max_num_batched_tokens,
            ),
        )


def _check_at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise StartupError(f"{name} must be {low} or more, not {value}.")

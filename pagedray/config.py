"""What an engine is made of: frozen records, read and validated once.

This module knows the words, not where they come from: checkpoints are read in
`workers.models.registry`, command lines in `cluster.cli.commands`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagedray.errors import StartupError

__all__ = [
    "Activation",
    "CacheConfig",
    "CacheSize",
    "Device",
    "Dtype",
    "EngineConfig",
    "KVCacheDtype",
    "LoadFormat",
    "ModelConfig",
    "NormKind",
    "ParallelConfig",
    "PlacementStrategy",
    "Preemption",
    "RopeConfig",
    "SchedulerConfig",
    "TensorNames",
]

Activation = Literal["silu", "gelu", "gelu_tanh"]
"""The function of an MLP; `gelu_tanh` approximates `gelu`."""
Device = Literal["cuda", "cpu"]
Dtype = Literal["float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "fp8_e4m3", "fp8_e5m2"]
LoadFormat = Literal["auto", "dummy"]
NormKind = Literal["rms", "offset_rms", "layer"]
"""`offset_rms` multiplies by one plus its weight; `layer` first takes the mean away."""
PlacementStrategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]
Preemption = Literal["auto", "swap", "recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How rotary position embeddings turn heads, and how they are scaled."""

    kind: Literal["default", "linear", "llama3", "longrope"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    pair_factors: tuple[float, ...] = ()
    """Of longrope: how much slower each pair turns."""
    magnitude: float = 1.0
    """What turned elements are multiplied by."""
    rotary_size: int | None = None
    """How many elements of a head are turned, the first ones; None is all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """What a checkpoint calls its layers, without `.weight` and `.bias`.

    All but the first four stand behind the name of their decoder layer.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    """The norm behind the embedding; None is no such norm."""
    decoder_layer: str = "model.layers.{}"
    """With the layer's index in place of the braces."""
    final_norm: str = "model.norm"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str | None = None
    """The norm of what attention gives; None is no such norm."""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Queries, keys and values; or one name, if one tensor holds all three."""
    is_qkv_by_head: bool = False
    """Whether that one tensor holds all three of a head before those of the next head."""
    qk_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")
    attention_output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    """The norm of what the MLP gives; None is no such norm."""
    mlp_input: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up; or one name, if one tensor holds both or there is no gate."""
    mlp_output: str = "mlp.down_proj"


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
    names: TensorNames = field(default_factory=TensorNames)
    norm_kind: NormKind = "rms"
    norm_eps: float = 1e-6
    has_norm_bias: bool = False
    embedding_scale: float = 1.0
    """What embeddings are multiplied by, once it is rounded to their type."""
    has_tied_embeddings: bool = False
    logit_soft_cap: float | None = None
    """Logits become `cap * tanh(logit / cap)`; None for no cap."""
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    """None turns nothing."""
    window_rope: RopeConfig | None = None
    """The rope of layers with a window; None is that of the others."""
    alibi_slopes: tuple[float, ...] | None = None
    """One for each head; None for no ALiBi."""
    attention_scale: float | None = None
    """What scores are multiplied by; None is one over the root of the head size."""
    attention_soft_cap: float | None = None
    """Scores become `cap * tanh(score / cap)`; None for no cap."""
    qkv_limit: float | None = None
    """The largest magnitude of queries, keys and values, beyond which they are cut off."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Keys a query may see, itself included, per layer; None is all of them."""
    activation: Activation = "silu"
    is_mlp_gated: bool = True
    has_mlp_bias: bool = False
    is_encoder: bool = False
    """Whether the model ends in hidden states, which are pooled, and generates nothing."""
    num_token_types: int = 0
    """Size of an encoder's table of token types; a decoder has none."""
    dtype: Dtype = "bfloat16"
    """The type of weights and activations."""
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

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return how `layer` turns its heads; None is not at all."""
        has_window = self.sliding_window(layer) is not None
        return self.window_rope if has_window and self.window_rope is not None else self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSize:
    """The size of both block pools, of one rank or of a group."""

    num_blocks: int
    num_cpu_blocks: int
    block_bytes: int
    """Bytes of one block of all layers; of a group, on all its ranks together."""


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
    kv_cache_dtype: KVCacheDtype = "auto"
    """Element type of keys and values; `auto` is the model's, fp8 halves their bytes."""

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
    max_queued_tokens: int = 2**20
    """Prompt tokens that may wait, unless it is one request alone that has more."""
    preemption: Preemption = "auto"
    """How a sequence makes room: swapped to the CPU pool, recomputed later, or swapped while
    there is room."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queued_requests",
            "max_queued_tokens",
        ):
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
    placement_strategy: PlacementStrategy = "STRICT_PACK"
    """How Ray places the ranks; STRICT_PACK is all on one node. See Ray's placement groups."""

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
    enforce_eager: bool = False
    """Whether decode steps on a GPU go without CUDA graphs, slower and with less memory."""
    load_seed: int = 0
    """Seed of dummy weights."""
    structure_compile_s: float = 10.0
    """CPU time that one schema, expression or grammar of a client may take to compile."""

    def __post_init__(self) -> None:
        if not 0.0 < self.structure_compile_s <= 60.0:
            raise StartupError(
                f"structure compile s {self.structure_compile_s} is not allowed; "
                "use above 0, at most 60."
            )

    @property
    def max_model_len(self) -> int:
        """The most tokens that a sequence may have, prompt and continuation."""
        return self.scheduler.max_model_len or self.model.max_positions

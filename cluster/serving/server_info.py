"""The reports of a server about itself, independent of any protocol."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from pagedray.version import __version__

if TYPE_CHECKING:
    from cluster.engine.stats import EngineStats
    from pagedray.config import EngineConfig

__all__ = ["CallInfo", "ServerInfo", "ServerLoads", "own_loads", "server_info", "server_loads"]

_PUBLIC_FIELDS = frozenset(("is_ready", "uptime_s", "num_blocks", "num_cpu_blocks", "calls"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """The static properties of a server."""

    version: str
    model: str
    """The name under which the model is served."""
    architecture: str
    """The architecture in the checkpoint's configuration, such as LlamaForCausalLM."""
    is_encoder: bool
    """Whether the model embeds or scores texts and does not generate."""
    vocab_size: int
    hidden_size: int
    context_length: int
    """The most tokens of prompt and output together."""
    dtype: str
    quantization: str
    """How weights are quantized, such as fp8; empty if they are not."""
    device: str
    """`cuda` or `cpu`."""
    kv_cache_dtype: str
    attention_backend: str
    """The attention backend, with the providers of its kernels: `torch_sdpa (native kernels)`."""
    num_ranks: int
    block_size: int
    num_blocks: int
    """Device blocks, equally many on every rank; 0 for an encoder."""
    num_cpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int
    sampling_defaults: dict[str, float]
    """Defaults of requests, from the model's generation_config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """One running call."""

    id: str
    """The id that its client knows."""
    tenant: str = ""
    """The name of the tenant."""
    age_s: float
    num_prompt_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoads:
    """The current loads of a server; sums over all tenants are 0 except for admins."""

    is_ready: bool
    uptime_s: float
    num_running: int
    """Sequences that have a row and all of their blocks."""
    num_waiting: int
    num_swapped: int
    num_queued_requests: int
    """Requests of which no sequence has started."""
    num_queued_tokens: int
    """Prompt tokens of the queued requests."""
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Free blocks that are still in the prefix cache."""
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    num_steps: int
    last_step_s: float
    num_prompt_tokens: int
    """Prompt tokens processed since the start; the following counts are since the start too."""
    num_generated_tokens: int
    num_queried_tokens: int
    """Tokens looked up in the prefix cache."""
    num_hit_tokens: int
    num_preemptions: int
    num_chains: int = 0
    """Sequences with guessed tokens in steps; the next two fields count these tokens."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    calls: tuple[CallInfo, ...]
    """The tenant's running calls, or all calls for an admin; oldest first, at most 100."""


def server_info(config: EngineConfig, stats: EngineStats) -> ServerInfo:
    """Return the static properties of a server."""
    model = config.model
    kv_cache_dtype = config.cache.kv_cache_dtype
    return ServerInfo(
        version=__version__,
        model=model.name,
        architecture=model.architecture,
        is_encoder=model.pools,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        context_length=config.max_model_len,
        dtype=model.dtype,
        quantization="" if model.quantization is None else model.quantization.method,
        device=config.parallel.device,
        kv_cache_dtype=model.dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
        attention_backend=stats.kernels.attention,
        num_ranks=config.parallel.tensor_parallel_size,
        block_size=config.cache.block_size,
        num_blocks=stats.scheduler.num_blocks,
        num_cpu_blocks=stats.scheduler.num_cpu_blocks,
        max_num_seqs=stats.scheduler.max_num_seqs,
        max_num_batched_tokens=stats.scheduler.max_num_batched_tokens,
        max_queued_requests=config.scheduler.max_queued_requests,
        sampling_defaults=dict(config.sampling_defaults),
    )


def server_loads(
    stats: EngineStats, *, is_ready: bool, uptime_s: float, calls: tuple[CallInfo, ...]
) -> ServerLoads:
    """Return the current loads of a server."""
    scheduler = stats.scheduler
    return ServerLoads(
        is_ready=is_ready,
        uptime_s=uptime_s,
        num_running=scheduler.num_running,
        num_waiting=scheduler.num_waiting,
        num_swapped=scheduler.num_swapped,
        num_queued_requests=scheduler.num_queued_requests,
        num_queued_tokens=scheduler.num_queued_tokens,
        num_blocks=scheduler.num_blocks,
        num_free_blocks=scheduler.num_free_blocks,
        num_cached_blocks=scheduler.num_cached_blocks,
        num_cpu_blocks=scheduler.num_cpu_blocks,
        num_free_cpu_blocks=scheduler.num_free_cpu_blocks,
        num_steps=stats.num_steps,
        last_step_s=stats.last_step_s,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generated_tokens=stats.num_generated_tokens,
        num_queried_tokens=scheduler.num_queried_tokens,
        num_hit_tokens=scheduler.num_hit_tokens,
        num_preemptions=scheduler.num_swap_preemptions + scheduler.num_recompute_preemptions,
        num_chains=scheduler.speculation.num_chains,
        num_draft_tokens=scheduler.speculation.num_draft_tokens,
        num_accepted_draft_tokens=scheduler.speculation.num_accepted_tokens,
        calls=calls,
    )


def own_loads(loads: ServerLoads) -> ServerLoads:
    """Return the loads that a tenant may see: its own calls, without sums over other tenants.

    Sums would reveal when another tenant sent a prompt, and how long it was.
    """
    # Any: fields are integers and floats.
    none: dict[str, Any] = {
        field.name: 0 for field in fields(ServerLoads) if field.name not in _PUBLIC_FIELDS
    }
    none["num_free_blocks"] = loads.num_blocks
    none["num_free_cpu_blocks"] = loads.num_cpu_blocks
    return replace(loads, **none)

"""What a server tells of itself, in no protocol's words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallInfo", "ServerInfo", "ServerLoads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What does not change while a server runs."""

    version: str
    model: str
    """The name under which the model is served."""
    architecture: str
    """As the checkpoint's configuration names it, such as LlamaForCausalLM."""
    is_encoder: bool
    """Whether it makes vectors of texts and generates nothing."""
    vocab_size: int
    hidden_size: int
    context_length: int
    """Tokens that prompt and output can have together."""
    dtype: str
    kv_cache_dtype: str
    attention_backend: str
    num_ranks: int
    block_size: int
    num_blocks: int
    """Blocks on the device, the same number on every rank; 0 for an encoder."""
    num_cpu_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queued_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallInfo:
    """One running call."""

    id: str
    """The id that its client knows."""
    tenant: str = ""
    """Whose it is."""
    age_s: float
    num_prompt_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLoads:
    """What a server has to do at one moment; sums over all tenants are 0 for all but admins."""

    is_ready: bool
    uptime_s: float
    num_running: int
    """Sequences that have a row and all their blocks."""
    num_waiting: int
    num_swapped: int
    num_queued_requests: int
    """Requests of which no sequence has started."""
    num_queued_tokens: int
    """Prompt tokens of these."""
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Free blocks whose content the prefix cache still knows."""
    num_cpu_blocks: int
    num_free_cpu_blocks: int
    num_steps: int
    last_step_s: float
    num_prompt_tokens: int
    """Prompt tokens taken since the start, as the following counts are."""
    num_generated_tokens: int
    num_queried_tokens: int
    """Tokens that were looked up in the prefix cache."""
    num_hit_tokens: int
    num_preemptions: int
    calls: tuple[CallInfo, ...]
    """The asking tenant's running calls, an admin's are everybody's, oldest first, 100 at most."""

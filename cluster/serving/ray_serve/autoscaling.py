"""How Ray Serve chooses the number of replicas: by the tokens in flight and by the KV cache.

Serve configurations name `cluster.serving.ray_serve.autoscaling:TokensPolicy`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.serving.server_info import ServerLoads

__all__ = ["ReplicaLoad", "TokensPolicy", "desired_replicas"]

_TOKENS_IN_FLIGHT = "tokens_in_flight"
_KV_USE = "kv_use"
_SPARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLoad:
    """The load of one replica."""

    tokens_in_flight: float
    """Tokens in the KV cache and queued prompt tokens."""
    kv_use: float
    """The fraction of device blocks in use, 0 to 1."""

    @classmethod
    def from_loads(cls, loads: ServerLoads, tokens_per_block: float) -> ReplicaLoad:
        """Return the load of a replica with these statistics.

        `tokens_per_block` is the block size, divided by the number of groups of layers.
        """
        num_taken = loads.num_blocks - loads.num_free_blocks
        return cls(
            tokens_in_flight=num_taken * tokens_per_block + loads.num_queued_tokens,
            kv_use=num_taken / loads.num_blocks if loads.num_blocks else 0.0,
        )

    def metrics(self) -> dict[str, float]:
        """Return the values that Serve collects."""
        return {_TOKENS_IN_FLIGHT: self.tokens_in_flight, _KV_USE: self.kv_use}


def desired_replicas(
    loads: Sequence[ReplicaLoad],
    *,
    num_target: int,
    target_tokens: float | None,
    target_kv_use: float,
    spare: float,
) -> int:
    """Return how many replicas the loads need; without target tokens, by KV blocks alone.

    `num_target` is the present target. It is reduced only if the work would leave the fraction
    `spare` of the fewer replicas free, so that the number does not oscillate.
    """
    needed = sum(one.kv_use for one in loads) / target_kv_use
    if target_tokens is not None:
        needed = max(needed, sum(one.tokens_in_flight for one in loads) / target_tokens)
    if needed >= num_target:
        return math.ceil(needed)
    return min(num_target, math.ceil(needed / (1.0 - spare)))


class TokensPolicy:
    """The policy that Ray Serve creates and calls."""

    def __init__(self, *, target_tokens: float | None, target_kv_use: float) -> None:
        self._target_tokens = target_tokens
        self._target_kv_use = target_kv_use

    # Any: the context and the state are of Ray's types.
    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas and the state to keep, which is empty."""
        metrics = context.aggregated_metrics or {}
        tokens, kv_use = metrics.get(_TOKENS_IN_FLIGHT, {}), metrics.get(_KV_USE, {})
        loads = [
            ReplicaLoad(tokens_in_flight=tokens[one], kv_use=kv_use.get(one, 0.0)) for one in tokens
        ]
        # Replicas without statistics are starting, and the load they will take over is unknown.
        is_known = len(loads) >= context.current_num_replicas > 0
        num_wanted = desired_replicas(
            loads,
            num_target=context.target_num_replicas,
            target_tokens=self._target_tokens,
            target_kv_use=self._target_kv_use,
            spare=_SPARE,
        )
        return (num_wanted if is_known else max(num_wanted, context.target_num_replicas)), {}

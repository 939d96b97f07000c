"""The work of a rank's steps, and the speed of its device.

Weights, states, and cached keys and values are counted. Activations, and exchanges between the
ranks of a group, are not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AttentionWork", "DeviceSpeed", "ExpertChoice", "RankRoofline", "WeightWork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightWork:
    """The work that the weights of one rank cause in a step."""

    num_bytes: int = 0
    """Bytes that every step reads."""
    expert_bytes: int = 0
    """Bytes of all experts; a step reads only the experts that its rows have chosen."""
    row_flop: float = 0.0
    """Operations of each row in products of the model's dtype; for experts, the mean over ranks."""
    fp8_row_flop: float = 0.0
    """Operations of each row in products of fp8 numbers."""

    def __add__(self, other: WeightWork) -> WeightWork:
        return WeightWork(
            num_bytes=self.num_bytes + other.num_bytes,
            expert_bytes=self.expert_bytes + other.expert_bytes,
            row_flop=self.row_flop + other.row_flop,
            fp8_row_flop=self.fp8_row_flop + other.fp8_row_flop,
        )

    def __sub__(self, other: WeightWork) -> WeightWork:
        return WeightWork(
            num_bytes=self.num_bytes - other.num_bytes,
            expert_bytes=self.expert_bytes - other.expert_bytes,
            row_flop=self.row_flop - other.row_flop,
            fp8_row_flop=self.fp8_row_flop - other.fp8_row_flop,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """The work of attention in layers with the same window, on one rank."""

    window: int | None
    """The most tokens that a query sees; None for all before it, and itself."""
    token_bytes: int
    """Bytes of the keys and values of one token, in all these layers."""
    pair_flop: float
    """Operations of each pair of a token and a token that it sees, in all these layers."""


@dataclass(frozen=True, slots=True)
class ExpertChoice:
    """How many experts a layer has, and how many each row chooses."""

    num_experts: int
    num_chosen: int

    def expected_part(self, num_rows: float) -> float:
        """Return the expected part of the experts that rows choose, if all are as likely."""
        return 1.0 - math.pow(1.0 - self.num_chosen / self.num_experts, num_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpeed:
    """The measured speed of a device."""

    read_bytes_per_s: float
    flop_per_s: float
    """Operations per second of matrix products in the model's dtype."""
    fp8_flop_per_s: float | None = None
    """None if the model has no products of fp8 numbers there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRoofline:
    """The work of one rank, and the speed of its device."""

    weights: WeightWork
    """Work for each token as a row. Of the embedding table, a step reads single rows."""
    sampled: WeightWork
    """Work for each row with logits: the head, and the part of the last layer that follows its
    attention.
    """
    attention: tuple[AttentionWork, ...]
    experts: ExpertChoice | None
    speed: DeviceSpeed
    state_bytes: int = 0
    """Bytes of the recurrent state of a sequence, which each of its steps reads and writes."""

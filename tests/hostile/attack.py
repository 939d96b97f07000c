"""The interface of attacks: a hostile client's traffic, and the guarantees that hold beside it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Attack", "Findings", "Target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server as the attacker sees it."""

    http_port: int
    grpc_port: int
    key: str | None
    """The attacker's own key; None if the server has no keys. Another tenant has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What the attacker sent, and how the server responded."""

    figures: Mapping[str, object] = field(default_factory=dict)
    """For the report, such as the number of frames sent."""
    broken: tuple[str, ...] = ()
    """Violations that the attacker achieved, one sentence for each."""


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """One kind of hostile client. It runs in a process of its own, so it is pickled."""

    name: str
    """In words, as in the report."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `pagedray serve`."""
    is_bounded: bool = True
    """Whether the server bounds the time and memory that it costs; otherwise a gateway must."""
    has_keys: bool = True
    """Whether the server requires keys."""
    max_descriptors: int | None = None
    """The limit of open files of the server; None is that of this process."""
    fast_s: float = 0.25
    """How long it runs in its short form."""
    full_s: float = 5.0
    """How long it runs in `make test-hostile`."""
    max_growth_mib: float = 64.0
    """The server's memory beyond that before the attack."""
    max_left_mib: float = 64.0
    """What of it may still be held a few seconds after the attack."""
    max_log_lines: int = 20

    @abstractmethod
    def run(self, target: Target, seconds: float) -> Findings:
        """Attack for about `seconds` with blocking calls; close all connections."""

"""What a fault is."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import psutil

from tests.chaos.clients.relay import Relay
from tests.chaos.targets.target import Target

__all__ = ["Fault", "Scene"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a fault happens."""

    target: Target
    generator: random.Random
    key: str
    """The API key of a tenant that no checked call belongs to."""
    relays: tuple[Relay, ...]
    """Through them clients connect that resume their streams."""
    hung: set[psutil.Process] = field(default_factory=set)
    """Processes that hang for ever, so that no other fault continues them."""


class Fault(ABC):
    """One thing that goes wrong, once."""

    name: ClassVar[str]
    """As in the table of docs/reliability.md."""
    targets: ClassVar[frozenset[str]] = frozenset({"server"})
    """The kinds of targets that it applies to."""
    needs_rank_processes: ClassVar[bool] = False
    needs_disk: ClassVar[bool] = False
    """Whether it fills the disk of the target, which only root can make."""
    needs_descriptor_limit: ClassVar[bool] = False
    """Whether it takes all connections that a low limit of descriptors allows."""
    may_end_streams: ClassVar[bool] = False
    """Whether accepted streams may end with an error. They never end in silence."""
    limit_s: ClassVar[float] = 60.0
    """How long it may take until the server is whole and streams continue, on a busy machine."""
    pause_limit_s: ClassVar[float] = 60.0
    """How long a stream may pause, on a busy machine."""
    pairs_with_others: ClassVar[bool] = True

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    @abstractmethod
    async def inject(self) -> None:
        """Let it happen; return when no more of it is to come."""

    def is_over(self) -> bool:
        """Whether the server has dealt with what was injected."""
        return True

"""The interface of faults."""

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
    """The target of a fault, and what a fault needs to know about the run."""

    target: Target
    generator: random.Random
    key: str
    """The API key of a tenant that no checked call belongs to."""
    relays: tuple[Relay, ...]
    """The relays through which clients that resume their streams connect."""
    hung: set[psutil.Process] = field(default_factory=set)
    """Processes that hang forever, so that no other fault continues them."""


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
        """Inject the fault; return once nothing more of it follows."""

    def is_over(self) -> bool:
        """Return whether the server has recovered from the fault."""
        return True

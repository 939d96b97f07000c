"""The interface of targets: a server with its processes, into which faults are injected."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.chaos.targets.small_disk import SmallDisk

__all__ = ["Holdings", "Target", "named", "tracebacks_in"]

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|Unhandled error")
_TRACEBACK_LENGTH = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The resources that all replicas of a target hold together."""

    num_calls: int
    num_blocks: int
    num_free_blocks: int

    @property
    def is_quiet(self) -> bool:
        """Whether there is no call and every block is free."""
        return self.num_calls == 0 and self.num_free_blocks == self.num_blocks


class Target(ABC):
    """A running server, and how its processes are found."""

    name: str
    grpc_target: str
    url: str
    model: str
    num_ranks: int
    """Rank processes when nothing is wrong; 0 if ranks run in the servers."""
    num_servers: int
    can_resume: bool = False
    """Whether clients can resume their streams."""
    disk: SmallDisk | None = None
    """Where it writes temporary files, if that is a file system of its own."""

    descriptor_limit: int | None = None
    """How many descriptors its servers may open, if that is few."""

    @abstractmethod
    def start(self) -> None:
        """Start it and wait until it is ready."""

    @abstractmethod
    def stop(self) -> None:
        """End it and all its processes."""

    @abstractmethod
    def servers(self) -> list[psutil.Process]:
        """Return the processes that hold the requests."""

    @abstractmethod
    def family(self) -> list[psutil.Process]:
        """Return all processes, Ray's included."""

    @abstractmethod
    async def holdings(self, key: str) -> Holdings:
        """Return what it holds, asked with the key of an admin."""

    @abstractmethod
    def tracebacks(self) -> list[str]:
        """Return the Python tracebacks in its logs, shortened."""

    async def all_serve(self, key: str) -> bool:
        """Return whether every server is ready, asked with an API key.

        Where there is one server, `/ready` has already answered for it.
        """
        return True

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks."""
        return named(self.family(), "GpuWorker")

    def is_whole(self) -> bool:
        """Whether all ranks and servers are there; spare ranks may be there too."""
        return (
            len(self.ranks()) >= self.num_ranks
            and sum(map(psutil.Process.is_running, self.servers())) == self.num_servers
        )


def tracebacks_in(log: Path) -> list[str]:
    """Return the Python tracebacks in a log, shortened, and those that Ray writes of actors."""
    _, *found = _TRACEBACK.split(log.read_text(errors="replace"))
    return [one[:_TRACEBACK_LENGTH] for one in found]


def named(processes: Iterable[psutil.Process], word: str) -> list[psutil.Process]:
    """Return the living processes whose command line has a word."""
    found = []
    for process in processes:
        try:
            is_alive = process.status() != psutil.STATUS_ZOMBIE
            if is_alive and word in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found

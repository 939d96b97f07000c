"""A head node of Ray without the processes that ranks do not need.

Each of these processes imports Ray and takes 80 to 120 MiB, and `ray.init` waits for the API
server, which sends usage statistics and serves the dashboard.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import ray
from ray._private.node import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["small_nodes"]


class SmallNode(Node):
    """Runs GCS, the raylet and its agents, and no other process of Ray's own."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start nothing: no dashboard, no usage statistics."""

    def start_monitor(self) -> None:
        """Start nothing: no nodes are added to this one."""

    def start_log_monitor(self) -> None:
        """Start nothing: what ranks log stays in their files."""


@contextmanager
def small_nodes() -> Iterator[None]:
    """Let `ray.init` start a `SmallNode` until the context ends."""
    node = ray._private.node
    node.Node = SmallNode  # type: ignore[misc]  # a class is replaced
    try:
        yield
    finally:
        node.Node = Node  # type: ignore[misc]

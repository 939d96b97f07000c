"""A head node of Ray without what ranks do not need, which makes it start sooner.

Each of Ray's own processes imports Ray, and takes 80 to 120 MiB. `ray.init` waits for some of them.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray._private.node import Node
from ray.exceptions import RpcError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["small_nodes"]

_REGISTRATION_POLL_S = 0.01
_REGISTRATION_TIMEOUT_S = 10.0
"""Afterwards, Ray waits, and reports what is wrong."""
_AGENT_PROGRAM = str(Path(__file__).with_name("ray_agent.py"))


class SmallNode(Node):
    """Runs GCS, the raylet and its agents, and no other process of Ray's own."""

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Start nothing: no dashboard, no usage statistics."""

    def start_monitor(self) -> None:
        """Start nothing: no nodes are added to this one."""

    def start_log_monitor(self) -> None:
        """Start nothing: what ranks log stays in their files."""

    def start_ray_processes(self) -> None:
        """Start the raylet, and wait until GCS knows it, which Ray looks up only once a second."""
        super().start_ray_processes()  # type: ignore[no-untyped-call]  # Ray has few types
        deadline_s = time.monotonic() + _REGISTRATION_TIMEOUT_S
        while time.monotonic() < deadline_s and not self._is_registered():
            time.sleep(_REGISTRATION_POLL_S)

    def _is_registered(self) -> bool:
        try:
            client = self.get_gcs_client()  # type: ignore[no-untyped-call]  # as above
            nodes = client.get_all_node_info(timeout=_REGISTRATION_TIMEOUT_S)
        except RpcError:
            return False
        return any(node_id.hex() == self.node_id for node_id in nodes)


@contextmanager
def small_nodes() -> Iterator[None]:
    """Let `ray.init` start a `SmallNode` until the context ends.

    Its dashboard agent, for which its raylet waits, is that of a Ray that was installed without the
    dashboard: it imports less, and serves no HTTP. All agents are run by `ray_agent.py`.
    """
    node, parts, services = ray._private.node, ray._private.utils, ray._private.services
    dependency_error = parts.get_dashboard_dependency_error
    python_command = services._build_python_executable_command_memory_profileable

    # Any: the arguments of Ray's function.
    def agent_command(*arguments: Any, **options: Any) -> list[str]:
        return [*python_command(*arguments, **options), _AGENT_PROGRAM]

    node.Node = SmallNode  # type: ignore[misc]  # a class is replaced
    parts.get_dashboard_dependency_error = _no_dashboard
    services._build_python_executable_command_memory_profileable = agent_command
    try:
        yield
    finally:
        node.Node = Node  # type: ignore[misc]
        parts.get_dashboard_dependency_error = dependency_error
        services._build_python_executable_command_memory_profileable = python_command


def _no_dashboard() -> ImportError:
    """Return why Ray has no dashboard, in place of `get_dashboard_dependency_error`."""
    return ImportError("The node of this process has no dashboard.")

"""Where the processes of a server listen, and what Ray's answer there."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import psutil

if TYPE_CHECKING:
    from tests.system.server_process import ServerProcess

__all__ = ["METHODS", "answers", "listeners"]

METHODS = {
    "gcs_server": "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ray::GpuWorker": "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
}
"""A method of each kind of process."""


def listeners(processes: list[psutil.Process]) -> dict[str, list[str]]:
    """Return the addresses on which processes listen, by name."""
    found: dict[str, list[str]] = {}
    for process in processes:
        addresses = [
            # Sockets for both families have mapped addresses.
            f"{one.laddr.ip.removeprefix('::ffff:')}:{one.laddr.port}"
            for one in process.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
        if addresses:
            found.setdefault(process.name(), []).extend(addresses)
    return found


def answers(server: ServerProcess, name: str, *tokens: str | None) -> list[set[grpc.StatusCode]]:
    """Call processes of Ray on each of their ports; return the codes of their answers by token."""
    with ExitStack() as stack:
        # Any: the type of a call depends on the serializers.
        calls: list[list[Any]] = [[] for _ in tokens]
        for address in listeners(server.named(name))[name]:
            channel = stack.enter_context(grpc.insecure_channel(address))
            # Any: an empty message is also an empty request.
            method: Any = channel.unary_unary(METHODS[name])  # type: ignore[call-arg]  # grpc-stubs asks for what has a default
            for token, made in zip(tokens, calls, strict=True):
                metadata = [] if token is None else [("authorization", f"Bearer {token}")]
                # The rendezvous of rank 0 never answers.
                made.append(method.future(b"", metadata=metadata, timeout=3.0))
        return [{call.code() for call in made} for made in calls]

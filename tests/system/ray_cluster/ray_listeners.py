"""Where the processes of a server listen, and what Ray's answer there."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from typing import Any

import grpc
import psutil

from tests.fakes import wait_for
from tests.system.server_process import ServerProcess

METHODS = {
    "gcs_server": "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ray::GpuWorker": "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
}
"""A method of each kind of process."""
_ANSWERS = (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
_LAST_ANSWERS_S = 3.0
"""How long other ports may take to answer after one of a process has."""


def listeners(processes: list[psutil.Process]) -> dict[str, list[str]]:
    """Return the addresses on which processes listen, by name."""
    found: dict[str, list[str]] = {}
    for process in processes:
        # Ray starts and ends idle workers at any time.
        with suppress(psutil.NoSuchProcess):
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
                made.append(method.future(b"", metadata=metadata, timeout=60.0))
        for made in calls:
            wait_for(lambda: any(map(_is_answered, made)))  # noqa: B023
        # The rendezvous of rank 0 never answers.
        end_s = time.monotonic() + _LAST_ANSWERS_S
        while time.monotonic() < end_s and not all(call.done() for made in calls for call in made):
            time.sleep(0.01)
        for made in calls:
            for call in made:
                call.cancel()
        return [{call.code() for call in made} for made in calls]


def _is_answered(call: Any) -> bool:  # Any: see above
    return call.done() and call.code() in _ANSWERS

"""The Ray that `pagedray serve` starts: where it listens, and who may call it."""

from __future__ import annotations

import ipaddress
import subprocess
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest

from tests.system.server_process import ROOT, TINY_LLAMA, ServerProcess, serve_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

METHODS = {
    "gcs_server": "/ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "raylet": "/ray.rpc.NodeManagerService/GetNodeStats",
    "ray::GpuWorker": "/ray.rpc.CoreWorkerService/GetCoreWorkerStats",
}
"""A method of each kind of process."""
DISABLED = {"RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        # As an operator starts it.
        patch.delenv("RAY_AUTH_TOKEN")
        patch.setenv("HOME", str(home))
        with ServerProcess(()) as server:
            yield server


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


def test_nothing_listens_beyond_the_loopback(server: ServerProcess) -> None:
    found = listeners(server.family())
    assert {"gcs_server", "raylet", "ray::GpuWorker"} <= set(found)
    beyond = [
        f"{name} {address}"
        for name, addresses in found.items()
        for address in addresses
        if not ipaddress.ip_address(address.rpartition(":")[0]).is_loopback
    ]
    assert beyond == []


@pytest.mark.parametrize("name", METHODS)
def test_ray_answers_to_the_token_alone(server: ServerProcess, home: Path, name: str) -> None:
    token = psutil.Process(server.named("raylet")[0].pid).environ()["RAY_AUTH_TOKEN"]
    accepted, *refused = answers(server, name, token, None, "", "0" * len(token))
    assert grpc.StatusCode.OK in accepted
    for codes in refused:
        assert grpc.StatusCode.UNAUTHENTICATED in codes
        assert grpc.StatusCode.OK not in codes
    assert not (home / ".ray").exists()


def test_ray_without_a_token_has_to_be_allowed() -> None:
    command, environment = serve_command(TINY_LLAMA, "--device=cpu")
    done = subprocess.run(
        command,
        env={**environment, **DISABLED},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()[-1:]
    assert "RAY_AUTH_MODE=disabled" in line
    assert "--allow-unauthenticated-ray" in line


@pytest.mark.slow
def test_allowed_ray_without_a_token_is_reported(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command, environment = serve_command(TINY_LLAMA, "--device=cpu", "--allow-unauthenticated-ray")
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command,
            env={**environment, **DISABLED},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Ready:")
        process.terminate()
        assert process.wait(30.0) == 0
    assert "Ray requires no token" in log.read_text()

"""A pod in namespaces of its own, started and ended as the kubelet does."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.kustomize import Manifest
from tests.image.built_image import BuiltImage
from tests.image.container_spec import container_spec
from tests.image.pod_network import add_to_network
from tests.image.volumes import Secrets, make_volumes

__all__ = ["Pod"]

_INIT_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Pod:
    """A pod with one container, and init containers before it."""

    manifest: Manifest
    images: dict[str, BuiltImage]
    secrets: Secrets
    folder: Path
    """Where its volumes, configurations and logs are."""
    number: int
    """The last part of its address."""
    names: dict[str, str] = field(default_factory=dict)
    """Addresses of services by name."""
    address: str = field(init=False)
    _network: Path = field(init=False)
    _volumes: dict[str, Path] = field(init=False)
    _process: subprocess.Popen[bytes] | None = field(init=False, default=None)
    _pre_stop_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self._network, self.address = add_to_network(self.name, self.number)
        self._volumes = make_volumes(self.manifest, self.folder / "volumes", self.secrets)
        hosts = {"localhost": "127.0.0.1", self.name: self.address, **self.names}
        lines = [f"{address}\t{name}\n" for name, address in hosts.items()]
        (self.folder / "hosts").write_text("".join(lines))
        (self.folder / "resolv.conf").write_text("")

    @property
    def name(self) -> str:
        """The name of the pod."""
        name: str = self.manifest["metadata"]["name"]
        return name

    @property
    def container(self) -> Manifest:
        """Its container in the manifest."""
        [container] = self.manifest["spec"]["containers"]
        return dict(container)

    @property
    def log(self) -> str:
        """What the container has written, as `kubectl logs` prints it."""
        return self._log_file(self.container).read_text(errors="replace")

    def start(self) -> None:
        """Run the init containers to their end, and start the container."""
        for container in self.manifest["spec"].get("initContainers", []):
            code = self._run(container).wait(_INIT_TIMEOUT_S)
            assert code == 0, f"{container['name']} exited with {code}: {self._tail(container)}"
        self._process = self._run(self.container)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `kubectl exec` does."""
        return subprocess.run(
            self._runc("exec", self._id(self.container), *command),
            check=False,
            capture_output=True,
            text=True,
        )

    def read_processes(self) -> list[dict[str, str]]:
        """Return the status of each process of the container, as /proc has it."""
        done = self.execute("sh", "-c", "cat /proc/[0-9]*/status")
        texts = done.stdout.split("Name:\t")[1:]
        return [_fields(f"Name:\t{text}") for text in texts]

    def assert_running(self) -> None:
        """Raise AssertionError, with the end of its log, if the container has ended."""
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"{self.name} exited with {code}: {self._tail(self.container)}"

    def run_pre_stop(self) -> float:
        """Run the hook with which the deletion of the pod begins, and return its seconds."""
        started_s = time.monotonic()
        match self.container["lifecycle"]["preStop"]:
            case {"sleep": {"seconds": seconds}}:
                time.sleep(seconds)
            case {"exec": {"command": command}}:
                done = self.execute(*command)
                assert done.returncode == 0, done.stdout + done.stderr
            case other:
                raise AssertionError(f"unknown kind of hook: {other}")
        self._pre_stop_s = time.monotonic() - started_s
        return self._pre_stop_s

    def terminate(self) -> float:
        """Send SIGTERM, wait for the end of the container and return the seconds that it took.

        Raises AssertionError if it still runs after the grace period.
        """
        assert self._process is not None
        left_s = self.manifest["spec"]["terminationGracePeriodSeconds"] - self._pre_stop_s
        started_s = time.monotonic()
        self._signal("TERM")
        try:
            self._process.wait(left_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after its grace period") from None
        return time.monotonic() - started_s

    def kill(self) -> None:
        """End the container at once, if it runs."""
        if self._process is not None and self._process.poll() is None:
            self._signal("KILL")
            self._process.wait()

    def _run(self, container: Manifest) -> subprocess.Popen[bytes]:
        bundle = self.folder / container["name"]
        bundle.mkdir()
        spec = self._spec(container)
        (bundle / "config.json").write_text(json.dumps(spec))
        with self._log_file(container).open("wb") as log:
            return subprocess.Popen(
                self._runc("run", "--bundle", str(bundle), self._id(container)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    # Any: JSON.
    def _spec(self, container: Manifest) -> dict[str, Any]:
        files = {f"/etc/{name}": self.folder / name for name in ("hosts", "resolv.conf")}
        return container_spec(
            self.manifest,
            container,
            image=self.images[container["image"]],
            volumes=self._volumes,
            files=files,
            network=self._network,
            secrets=self.secrets,
        )

    def _signal(self, name: str) -> None:
        subprocess.run(self._runc("kill", self._id(self.container), name), check=True)

    def _runc(self, *arguments: str) -> list[str]:
        return ["runc", "--root", str(self.folder / "runc"), *arguments]

    def _id(self, container: Manifest) -> str:
        return f"{self.name}-{container['name']}"

    def _log_file(self, container: Manifest) -> Path:
        return self.folder / f"{container['name']}.log"

    def _tail(self, container: Manifest) -> str:
        return self._log_file(container).read_text(errors="replace")[-4000:]


def _fields(text: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)

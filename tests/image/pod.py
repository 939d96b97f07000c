"""A pod in namespaces of its own, started and ended as the kubelet does."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.kustomize import Manifest, parse_quantity
from tests.image.built_image import BuiltImage
from tests.image.pod_network import add_to_network

__all__ = ["Pod"]

_INIT_TIMEOUT_S = 120.0

_POD_SECURITY = {
    "fsGroup",
    "fsGroupChangePolicy",
    "runAsGroup",
    "runAsNonRoot",
    "runAsUser",
    "seccompProfile",
}
_OPEN_FILES = min(1048576, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
"""containerd's limit, or this machine's."""
_NAMESPACES = ("pid", "mount", "ipc", "uts")
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/firmware",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
_FILE = Path("/usr/share/containers/seccomp.json")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_OF_RUNTIME = ("names", "action", "args", "errnoRet")
Secrets = dict[str, dict[str, str]]
"""The keys and values of Secrets by name."""


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


def container_spec(
    pod: Manifest,
    container: Manifest,
    *,
    image: BuiltImage,
    volumes: dict[str, Path],
    files: dict[str, Path],
    network: Path,
    secrets: Secrets,
) -> dict[str, Any]:
    """Return the configuration of a container.

    `files` are mounted read-only at their keys; `network` is the pod's network namespace.
    """
    security = pod["spec"]["securityContext"]
    own = container["securityContext"]
    assert set(security) == _POD_SECURITY
    assert security["runAsNonRoot"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert set(own) == {"allowPrivilegeEscalation", "capabilities", "readOnlyRootFilesystem"}
    assert own["capabilities"] == {"drop": ["ALL"]}
    env = image.env | {one["name"]: _value(one, secrets) for one in container["env"]}
    command = [*container.get("command", image.command), *container.get("args", [])]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {
                "uid": security["runAsUser"],
                "gid": security["runAsGroup"],
                "additionalGids": [security["fsGroup"]],
            },
            "args": command,
            "env": [f"{name}={value}" for name, value in env.items()],
            "cwd": image.working_dir,
            # None of any set.
            "capabilities": {},
            "noNewPrivileges": not own["allowPrivilegeEscalation"],
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": _OPEN_FILES, "soft": _OPEN_FILES}],
        },
        "root": {"path": str(image.root), "readonly": own["readOnlyRootFilesystem"]},
        "hostname": pod["metadata"]["name"],
        "mounts": [
            *_system_mounts(),
            *(_bind(path, target, "ro") for target, path in files.items()),
            *(
                _bind(volumes[one["name"]], one["mountPath"], _access(one))
                for one in container["volumeMounts"]
            ),
        ],
        "linux": {
            "namespaces": [
                *({"type": kind} for kind in _NAMESPACES),
                {"type": "network", "path": str(network)},
            ],
            "resources": {
                "memory": {"limit": parse_quantity(container["resources"]["limits"]["memory"])}
            },
            "seccomp": default_profile(),
            "maskedPaths": list(_MASKED),
            "readonlyPaths": list(_READ_ONLY),
        },
    }


def _value(variable: Manifest, secrets: Secrets) -> str:
    match variable:
        case {"value": str() as value}:
            return value
        case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
            return secrets[name][key]
        case _:
            raise AssertionError(f"unknown kind of variable: {variable}")


def _access(mount: Manifest) -> str:
    return "ro" if mount.get("readOnly", False) else "rw"


def _bind(source: Path, target: str, access: str) -> dict[str, Any]:
    return {
        "destination": target,
        "type": "bind",
        "source": str(source),
        "options": ["rbind", "rprivate", access],
    }


def _system_mounts() -> list[dict[str, Any]]:
    shm = ("/dev/shm", "tmpfs", ["nosuid", "noexec", "nodev", "mode=1777", "size=65536k"])
    rows = [
        ("/proc", "proc", ["nosuid", "noexec", "nodev"]),
        ("/dev", "tmpfs", ["nosuid", "strictatime", "mode=755", "size=65536k"]),
        ("/dev/pts", "devpts", ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]),
        shm,
        ("/dev/mqueue", "mqueue", ["nosuid", "noexec", "nodev"]),
        ("/sys", "sysfs", ["nosuid", "noexec", "nodev", "ro"]),
        ("/sys/fs/cgroup", "cgroup", ["nosuid", "noexec", "nodev", "relatime", "ro"]),
    ]
    return [
        {"destination": target, "type": kind, "source": kind, "options": options}
        for target, kind, options in rows
    ]


# Any: JSON.
def default_profile() -> dict[str, Any]:
    """Return the value of `linux.seccomp` of a container."""
    profile = json.loads(_FILE.read_text())
    machine = platform.machine()
    return {
        "defaultAction": profile["defaultAction"],
        "defaultErrnoRet": profile["defaultErrnoRet"],
        "architectures": [f"SCMP_ARCH_{machine.upper()}"],
        "syscalls": [
            {key: rule[key] for key in _OF_RUNTIME if rule.get(key) is not None}
            for rule in profile["syscalls"]
            if _applies(rule, _ARCHITECTURES[machine])
        ],
    }


# Any: JSON.
def _applies(rule: dict[str, Any], architecture: str) -> bool:
    includes = rule.get("includes", {})
    if includes.get("caps"):
        return False
    architectures = includes.get("arches")
    return not architectures or architecture in architectures


def make_volumes(pod: Manifest, folder: Path, secrets: Secrets) -> dict[str, Path]:
    """Mount the volumes of a pod below a folder and return where, by name.

    A write beyond the limit of an `emptyDir` fails, where the kubelet would evict the pod.
    """
    group = pod["spec"]["securityContext"]["fsGroup"]
    made = {}
    for volume in pod["spec"]["volumes"]:
        path = folder / volume["name"]
        path.mkdir(parents=True)
        match volume:
            case {"emptyDir": {"sizeLimit": limit}}:
                _mount(path, parse_quantity(limit))
                os.chown(path, 0, group)
                path.chmod(0o2777)
            case {"secret": secret}:
                _mount(path, 1 << 20)
                _write_secret(path, secret, secrets[secret["secretName"]], group)
            case _:
                raise AssertionError(f"unknown kind of volume: {volume}")
        made[volume["name"]] = path
    return made


def _mount(path: Path, num_bytes: int) -> None:
    options = f"size={num_bytes},mode=0755,nosuid,nodev"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)


def _write_secret(path: Path, secret: Manifest, values: dict[str, str], group: int) -> None:
    """Write files behind two symbolic links, which the kubelet changes atomically."""
    data = path / "..2026_01_01_00_00_00.1"
    data.mkdir()
    os.chown(data, 0, group)
    data.chmod(0o2755)
    for name, value in values.items():
        file = data / name
        file.write_text(value)
        os.chown(file, 0, group)
        file.chmod(secret["defaultMode"])
        (path / name).symlink_to(Path("..data", name))
    (path / "..data").symlink_to(data.name)
    os.chown(path, 0, group)
    path.chmod(0o3777)

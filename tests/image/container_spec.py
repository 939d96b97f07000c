"""The OCI runtime's configuration of a container of a pod, as the kubelet and containerd make it.

Only what our manifests use is translated; anything else is rejected, so that no field is ignored.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

from tests.deploy.quantity import parse_quantity
from tests.image.seccomp import default_profile

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest
    from tests.image.built_image import BuiltImage
    from tests.image.volumes import Secrets

__all__ = ["container_spec"]

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

"""The pod security standard `restricted`, as Kubernetes documents it for pods of Linux."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.deploy.kustomize import Manifest

__all__ = ["restricted_violations"]

_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_PROFILES = ("RuntimeDefault", "Localhost")


def restricted_violations(pod: Manifest) -> list[str]:
    """Return why a namespace that enforces the standard rejects the spec of a pod."""
    return [
        *_of_pod(pod),
        *(
            violation
            for kind in ("containers", "initContainers", "ephemeralContainers")
            for container in pod.get(kind, [])
            for violation in _of_container(pod.get("securityContext", {}), container)
        ),
    ]


def _of_pod(pod: Manifest) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", []):
        if not set(volume) - {"name"} <= _VOLUMES:
            yield f"volume {volume['name']}"
    context = pod.get("securityContext", {})
    # Kubernetes allows a few, none of which is needed here.
    for field in ("sysctls", "seLinuxOptions", "appArmorProfile", "windowsOptions"):
        if field in context:
            yield field


def _of_container(context: Manifest, container: Manifest) -> Iterator[str]:
    own = container.get("securityContext", {})
    merged = {**context, **own}
    if merged.get("runAsNonRoot") is not True:
        yield f"{container['name']}: runAsNonRoot"
    if merged.get("runAsUser") == 0:
        yield f"{container['name']}: runAsUser"
    if merged.get("seccompProfile", {}).get("type") not in _PROFILES:
        yield f"{container['name']}: seccompProfile"
    if own.get("allowPrivilegeEscalation") is not False:
        yield f"{container['name']}: allowPrivilegeEscalation"
    if own.get("privileged") or "procMount" in own:
        yield f"{container['name']}: privileged or procMount"
    capabilities = own.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", []):
        yield f"{container['name']}: capabilities.drop"
    if not set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"}:
        yield f"{container['name']}: capabilities.add"
    if any(port.get("hostPort") for port in container.get("ports", [])):
        yield f"{container['name']}: hostPort"

"""`pagedray deploy status`: reports why a deployment on Kubernetes waits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from cluster.cli.deploy.pod_state import claim_lines, job_lines, pod_lines, warning_of
from cluster.cli.deploy.service_state import is_ready, service_lines
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["status", "status_lines"]

_KINDS = "rayservices.ray.io,pods,jobs.batch,persistentvolumeclaims,events"
_KUBECTL_TIMEOUT_S = 60.0
_MAX_REASON = 300

# Any: JSON of Kubernetes.
Object = dict[str, Any]


def status(name: str, *, namespace: str | None, file: Path | None) -> int:
    """Print the state of a service; return 0 if it serves, else 1. Raises StartupError."""
    objects = _read(file) if file is not None else _ask(namespace)
    try:
        service, others = _of_release(objects, name)
        lines = status_lines(service, others)
    except (AttributeError, KeyError, TypeError) as error:
        raise StartupError(
            "The objects are not in the format of Kubernetes and KubeRay 1.7."
        ) from error
    print("\n".join(lines))
    return 0 if is_ready(service) else 1


def status_lines(service: Object, others: list[Object]) -> list[str]:
    """Return the state of a RayService, and why its pods, Jobs and claims wait."""
    pods = [one for one in others if one.get("kind") == "Pod"]
    events = [one for one in others if one.get("kind") == "Event"]
    volumes = _claimed_volumes(pods)
    parts: list[str] = []
    for one in others:
        name, warning = one["metadata"]["name"], warning_of(one, events)
        match one.get("kind"):
            case "PersistentVolumeClaim":
                parts += claim_lines(one, warning, volumes.get(name, ""))
            case "Job":
                parts += job_lines(one, warning)
            case "Pod":
                parts += pod_lines(one, warning)
    # The same reason for several pods is one line.
    return [*service_lines(service), *dict.fromkeys(parts)]


def _of_release(objects: list[Object], name: str) -> tuple[Object, list[Object]]:
    """Return the RayService, and the objects that belong to it."""
    services = [one for one in objects if one.get("kind") == "RayService"]
    found = [one for one in services if one["metadata"]["name"] == name]
    if not found:
        names = ", ".join(sorted(one["metadata"]["name"] for one in services)) or "none"
        raise StartupError(f"There is no RayService {name!r:.80}; those found: {names:.200}.")
    ours = {name, f"{name}-download"}
    pods_and_jobs = [
        one
        for one in objects
        if one["metadata"].get("labels", {}).get("app.kubernetes.io/name") in ours
        and one.get("kind") in ("Pod", "Job")
    ]
    claims = _claimed_volumes([one for one in pods_and_jobs if one["kind"] == "Pod"])
    used = [
        one
        for one in objects
        if one.get("kind") == "PersistentVolumeClaim" and one["metadata"]["name"] in claims
    ]
    # In the order in which one waits for the other.
    jobs, pods = ([one for one in pods_and_jobs if one["kind"] == kind] for kind in ("Job", "Pod"))
    events = [one for one in objects if one.get("kind") == "Event"]
    return found[0], [*used, *jobs, *pods, *events]


def _claimed_volumes(pods: list[Object]) -> dict[str, str]:
    """Return the volume of pods that each claim is for."""
    found = {}
    for pod in pods:
        for volume in pod["spec"].get("volumes", []):
            if "persistentVolumeClaim" in volume:
                found[volume["persistentVolumeClaim"]["claimName"]] = volume["name"]
            elif "ephemeral" in volume:
                found[f"{pod['metadata']['name']}-{volume['name']}"] = volume["name"]
    return found


def _ask(namespace: str | None) -> list[Object]:
    command = ["kubectl", "get", _KINDS, "--output", "json"]
    if namespace is not None:
        command += ["--namespace", namespace]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_KUBECTL_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise StartupError(
            "kubectl is not installed; install it, or run it elsewhere and pass its output with "
            f"--file (kubectl get {_KINDS} -o json)."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise StartupError(f"kubectl did not respond within {_KUBECTL_TIMEOUT_S:.0f} s.") from error
    if done.returncode != 0:
        # Lines of its log may come before its message.
        reason = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        reason = reason.rstrip(".")[:_MAX_REASON]
        raise StartupError(f"kubectl failed: {reason}{'' if reason.endswith('?') else '.'}")
    return _objects(done.stdout, "kubectl")


def _read(file: Path) -> list[Object]:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"Cannot read {file}: {reason}.") from error
    return _objects(text, str(file))


def _objects(text: str, source: str) -> list[Object]:
    try:
        # Any: JSON.
        found: Any = json.loads(text)
        items = found["items"] if found.get("kind", "").endswith("List") else [found]
        return [one for one in items if isinstance(one["metadata"]["name"], str)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise StartupError(
            f"{source} is not JSON of Kubernetes; use the output of kubectl get {_KINDS} -o json."
        ) from error

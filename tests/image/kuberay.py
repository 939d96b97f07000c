"""The pods that KubeRay 1.7 makes of a RayService, as far as they concern containers.

It completes the parameters of `ray start`, adds variables, the token and an init container, and
leaves the rest of the templates as it is. It does not know how pods are run.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from tests.deploy.kustomize import parse_quantity

if TYPE_CHECKING:
    from tests.deploy.kustomize import Manifest

__all__ = ["CLUSTER", "HEAD_SERVICE", "head_pod", "worker_pod"]

CLUSTER = "pagedray-x7k2p"
"""The name of the Ray cluster: that of the RayService and a random suffix."""
NAMESPACE = "llm"
HEAD_SERVICE = f"{CLUSTER}-head-svc.{NAMESPACE}.svc.cluster.local"
_GCS = 6379
_SHELL = ["/bin/bash", "-c", "--"]
_WAIT_FOR_GCS = f"""
SECONDS=0
while true; do
    if (( SECONDS <= 120 )); then
        if ray health-check --address {HEAD_SERVICE}:{_GCS} > /dev/null 2>&1; then
            break
        fi
    else
        if ray health-check --address {HEAD_SERVICE}:{_GCS}; then
            break
        fi
    fi
    sleep 5
done
"""


def head_pod(ray_service: Manifest) -> Manifest:
    """Return the pod of the head."""
    group = ray_service["spec"]["rayClusterConfig"]["headGroupSpec"]
    parameters = {"dashboard-host": "0.0.0.0", **group["rayStartParams"]}
    pod = _pod(group, "headgroup", "head")
    [container] = pod["spec"]["containers"]
    _add_token(container)
    _set_command(container, "ray start --head ", parameters)
    _add_variables(container, pod, "127.0.0.1")
    return pod


def worker_pod(ray_service: Manifest) -> Manifest:
    """Return a pod of the only group of workers."""
    [group] = ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    parameters = {"address": f"{HEAD_SERVICE}:{_GCS}", **group["rayStartParams"]}
    pod = _pod(group, group["groupName"], "worker")
    [container] = pod["spec"]["containers"]
    wait = {
        "name": "wait-gcs-ready",
        "image": container["image"],
        "command": _SHELL,
        "args": [_WAIT_FOR_GCS],
        "securityContext": container["securityContext"],
        "env": [*container["env"], {"name": "FQ_RAY_IP", "value": HEAD_SERVICE}],
        "volumeMounts": container["volumeMounts"],
        "resources": {"limits": {"cpu": "200m", "memory": "256Mi"}},
    }
    pod["spec"]["initContainers"] = [*pod["spec"].get("initContainers", []), wait]
    for one in (container, wait):
        _add_token(one)
    _set_command(container, "ray start ", parameters)
    container["env"].append({"name": "FQ_RAY_IP", "value": HEAD_SERVICE})
    _add_variables(container, pod, HEAD_SERVICE)
    return pod


def _pod(group: Manifest, name: str, kind: str) -> Manifest:
    template = copy.deepcopy(group["template"])
    labels = {"ray.io/cluster": CLUSTER, "ray.io/group": name, "ray.io/node-type": kind}
    metadata = template["metadata"]
    return {
        "metadata": {
            **metadata,
            "name": f"{CLUSTER}-{name}-{kind}",
            "namespace": NAMESPACE,
            "labels": {**metadata.get("labels", {}), **labels},
        },
        "spec": template["spec"],
    }


def _add_token(container: Manifest) -> None:
    secret = {"name": CLUSTER, "key": "auth_token"}
    container["env"] = [
        *container["env"],
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}},
    ]


def _set_command(container: Manifest, start: str, given: dict[str, str]) -> None:
    limits = container["resources"]["limits"]
    parameters = {
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        "num-cpus": limits["cpu"],
        "memory": str(parse_quantity(limits["memory"])),
        **given,
        "block": "true",
    }
    command = start + "".join(_flag(name, parameters[name]) for name in sorted(parameters))
    container["command"] = _SHELL
    container["args"] = [f"ulimit -n ${{RAY_START_ULIMIT_OPEN_FILES:-65536}}; {command}"]
    container["env"].append({"name": "KUBERAY_GEN_RAY_START_CMD", "value": command})


def _flag(name: str, value: str) -> str:
    match value.lower():
        case "true":
            return f" --{name} "
        case "false" if name not in ("log-color", "include-dashboard", "include-log-monitor"):
            return ""
        case _:
            return f" --{name}={value} "


def _add_variables(container: Manifest, pod: Manifest, address: str) -> None:
    labels = pod["metadata"]["labels"]
    defaults = {
        "RAY_CLUSTER_NAME": CLUSTER,
        "RAY_CLUSTER_NAMESPACE": NAMESPACE,
        "RAY_CLOUD_INSTANCE_ID": pod["metadata"]["name"],
        "RAY_NODE_TYPE_NAME": labels["ray.io/group"],
        "RAY_PORT": str(_GCS),
        "RAY_timeout_ms_task_wait_for_death_info": "0",
        "RAY_gcs_server_request_timeout_seconds": "5",
        "RAY_SERVE_KV_TIMEOUT_S": "5",
        "RAY_ADDRESS": f"{address}:{_GCS}",
        "RAY_USAGE_STATS_KUBERAY_IN_USE": "1",
        "RAY_DASHBOARD_ENABLE_K8S_DISK_USAGE": "1",
    }
    names = {one["name"] for one in container["env"]}
    container["env"] += [
        {"name": name, "value": value} for name, value in defaults.items() if name not in names
    ]

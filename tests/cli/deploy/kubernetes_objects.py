"""Objects of Kubernetes, as kubectl prints them."""

from __future__ import annotations

from typing import Any

# Any: JSON of Kubernetes.
Object = dict[str, Any]

READY = {"type": "Ready", "status": "True", "reason": "NonZeroServeEndpoints"}
NOT_READY = {"type": "Ready", "status": "False", "reason": "ZeroServeEndpoints"}
_LABELS = {"app.kubernetes.io/name": "pagedray"}


def service(**status: Any) -> Object:  # Any: as above.
    return {
        "kind": "RayService",
        "metadata": {"name": "pagedray", "generation": 2},
        "spec": {},
        "status": {"observedGeneration": 2, **status} if status else {},
    }


def cluster(name: str = "pagedray-abc", **changes: Any) -> Object:  # Any: as above.
    state = {"desiredWorkerReplicas": 1, "readyWorkerReplicas": 1, **changes.pop("state", {})}
    return {"rayClusterName": name, "rayClusterStatus": state, **changes}


def application(_status: str, **deployment: str) -> Object:
    return {
        "pagedray": {
            "status": _status,
            "serveDeploymentStatuses": {"Replica": deployment} if deployment else {},
        }
    }


def pod(name: str = "pagedray-ranks-1", **status: Any) -> Object:  # Any: as above.
    metadata = {"name": name, "labels": _LABELS}
    claim = {"persistentVolumeClaim": {"claimName": "pagedray-models"}}
    spec = {"volumes": [{"name": "models", **claim}]}
    return {"kind": "Pod", "metadata": metadata, "spec": spec, "status": status}


def event(kind: str, name: str, reason: str, message: str, time: str = "") -> Object:
    return {
        "kind": "Event",
        "metadata": {"name": f"{name}.{time or reason}"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": {"kind": kind, "name": name},
        "lastTimestamp": time or None,
    }

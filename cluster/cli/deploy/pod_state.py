"""Why pods, Jobs and volume claims wait, by their status and events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["claim_lines", "job_lines", "pod_lines", "warning_of"]

# Any: JSON of Kubernetes.
_Object = dict[str, Any]
_MAX_MESSAGE = 300
_ADVICE = {
    "CrashLoopBackOff": "read its log with kubectl logs --previous",
    "CreateContainerConfigError": "create the Secret or ConfigMap that is missing",
    "CreateContainerError": "read the events of the pod with kubectl describe pod",
    "ErrImageNeverPull": "the node does not have the image; use another image.pullPolicy",
    "ErrImagePull": "check image.repository, image.tag and image.pullSecrets",
    "ImagePullBackOff": "check image.repository, image.tag and image.pullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
    "RunContainerError": "read the events of the pod with kubectl describe pod",
}
_SUB_PATH_ADVICE = "check that the claim has the folder storage.subPath"
_CLAIM_VALUES = {
    "disk-cache": "diskCache.storageClassName",
    "models": "storage.storageClassName, storage.accessMode",
}
"""The values for the claim of each volume; others are for the state of the Ray cluster."""
_CREATING = {"ContainerCreating", "PodInitializing"}
_WARNINGS = {
    "Job": {"FailedCreate"},
    "PersistentVolumeClaim": {"ProvisioningFailed"},
    "Pod": {"FailedAttachVolume", "FailedCreatePodSandBox", "FailedMapVolume", "FailedMount"},
}
"""The reasons of events that say more than the status of an object."""
_WAIT = "wait-for-model"
_WORKER = "ray-worker"


def warning_of(one: _Object, events: list[_Object]) -> str:
    """Return why an object cannot be made by the last event that says so, or nothing."""
    reasons = _WARNINGS.get(one.get("kind", ""), set())
    target = one.get("kind"), one["metadata"]["name"]
    about = [
        event for event in events if event.get("reason") in reasons and _target_of(event) == target
    ]
    last = max(about, key=_time_of, default={})
    return _shown(last.get("message") or "")


def claim_lines(claim: _Object, warning: str, volume: str) -> Iterator[str]:
    """Yield why the claim of a volume waits."""
    if claim.get("status", {}).get("phase") == "Pending":
        modes = ", ".join(claim.get("spec", {}).get("accessModes", []))
        values = _CLAIM_VALUES.get(volume, "gcs.rocksdb.storageClassName")
        details = f": {warning}" if warning else ""
        yield (
            f"Claim {claim['metadata']['name']} has no volume yet{details}; check that a storage "
            f"class provides {modes} ({values})."
        )


def job_lines(job: _Object, warning: str) -> Iterator[str]:
    """Yield why a Job that downloads a model waits."""
    name, status = job["metadata"]["name"], job.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", [])}
    if conditions.get("Failed", {}).get("status") == "True":
        yield (
            f"Job {name} gave up: read its log (kubectl logs job/{name}), fix the cause, delete "
            "the Job, and run helm upgrade to start it again."
        )
    elif conditions.get("Complete", {}).get("status") != "True":
        failed = status.get("failed", 0)
        tries = f", after {failed} failed tries" if failed else ""
        if warning and not status.get("active"):
            yield f"Job {name} has no pod{tries}: {warning}."
        else:
            yield f"Job {name} downloads the model{tries} (kubectl logs --follow job/{name})."


def pod_lines(pod: _Object, warning: str) -> Iterator[str]:
    """Yield why a pod waits."""
    name, status = pod["metadata"]["name"], pod.get("status", {})
    if status.get("phase") == "Succeeded" or "deletionTimestamp" in pod["metadata"]:
        return
    # Of the node: the pod was evicted, for example. A container's reason is its own.
    if status.get("phase") == "Failed" and "reason" in status:
        message = _shown(status.get("message", ""))
        yield f"Pod {name} failed: {status['reason']}{f': {message}' if message else ''}."
        return
    for one in status.get("conditions", []):
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            yield f"Pod {name} has no node: {_shown(one.get('message', ''))}."
            return
    initial, main = (status.get(f"{kind}Statuses", []) for kind in ("initContainer", "container"))
    if any(one["name"] == _WAIT and "running" in one.get("state", {}) for one in initial):
        yield f"Pod {name} waits for the download of the model."
        return
    containers = [*initial, *main]
    for one in containers:
        yield from _container(pod, one)
    # Nothing runs yet, so the event is recent: a Secret is missing, for example.
    if warning and all(_waiting_reason(one) in _CREATING for one in containers):
        yield f"Pod {name} does not start: {warning}."


def _container(pod: _Object, container: _Object) -> Iterator[str]:
    reason, state = _waiting_reason(container), container.get("state", {})
    what = f"Container {container['name']} of pod {pod['metadata']['name']}"
    if reason in _ADVICE:
        message = _shown(state["waiting"].get("message", ""))
        details = f": {message}" if message else ""
        # A folder that is only read cannot be made by Kubernetes.
        advice = _SUB_PATH_ADVICE if "subPath" in message else _ADVICE[reason]
        yield f"{what} does not start: {reason}{details}; {advice}."
    for one in (state, container.get("lastState", {})):
        if one.get("terminated", {}).get("reason") == "OOMKilled":
            advice = ": raise worker.memory" if container["name"] == _WORKER else ""
            yield f"{what} used more memory than its limit{advice}."
            return
    code = state.get("terminated", {}).get("exitCode", 0)
    # It will not start again. Of a download, the Job says so.
    if code and pod["status"].get("phase") == "Failed" and not _is_of_job(pod):
        command = f"kubectl logs {pod['metadata']['name']} -c {container['name']}"
        yield f"{what} ended with exit code {code}: read its log ({command})."


def _waiting_reason(container: _Object) -> str:
    reason: str = container.get("state", {}).get("waiting", {}).get("reason", "")
    return reason


def _is_of_job(pod: _Object) -> bool:
    return any(one.get("kind") == "Job" for one in pod["metadata"].get("ownerReferences", []))


def _target_of(event: _Object) -> tuple[str, str]:
    target = event.get("involvedObject", {})
    return target.get("kind", ""), target.get("name", "")


def _time_of(event: _Object) -> str:
    # Times of one format, in UTC. An event has either of the two.
    return event.get("lastTimestamp") or event.get("eventTime") or ""


def _shown(text: str) -> str:
    return " ".join(text.split())[:_MAX_MESSAGE].rstrip(".")

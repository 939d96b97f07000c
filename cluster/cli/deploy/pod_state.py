"""What pods, Jobs and volume claims wait for, by their status."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["claim_lines", "job_lines", "pod_lines"]

# Any: JSON of Kubernetes.
_Object = dict[str, Any]
_MAX_MESSAGE = 300
_ADVICE = {
    "CrashLoopBackOff": "read its log with kubectl logs --previous",
    "CreateContainerConfigError": "create the Secret or ConfigMap that is missing",
    "ErrImagePull": "check image.repository, image.tag and image.pullSecrets",
    "ImagePullBackOff": "check image.repository, image.tag and image.pullSecrets",
    "InvalidImageName": "check image.repository and image.tag",
}
_SUB_PATH_ADVICE = "check that the claim has the folder storage.subPath"
_WAIT = "wait-for-model"
_WORKER = "ray-worker"


def claim_lines(claim: _Object) -> Iterator[str]:
    """Yield what a volume claim waits for."""
    if claim.get("status", {}).get("phase") == "Pending":
        spec = claim.get("spec", {})
        yield (
            f"Claim {claim['metadata']['name']} has no volume yet: check that a storage class "
            f"provides {', '.join(spec.get('accessModes', []))} (storage.storageClassName, "
            "storage.accessMode)."
        )


def job_lines(job: _Object) -> Iterator[str]:
    """Yield what a Job that downloads a model waits for."""
    name, status = job["metadata"]["name"], job.get("status", {})
    conditions = {one["type"]: one for one in status.get("conditions", [])}
    if conditions.get("Failed", {}).get("status") == "True":
        yield (
            f"Job {name} gave up: read its log (kubectl logs job/{name}), mend the cause, delete "
            "the Job, and run helm upgrade to start it again."
        )
    elif conditions.get("Complete", {}).get("status") != "True":
        failed = status.get("failed", 0)
        tries = f", after {failed} failed tries" if failed else ""
        yield f"Job {name} downloads the model{tries} (kubectl logs --follow job/{name})."


def pod_lines(pod: _Object) -> Iterator[str]:
    """Yield what a pod waits for."""
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
    for container in status.get("initContainerStatuses", []):
        yield from _container(name, container)
        if container["name"] == _WAIT and "running" in container.get("state", {}):
            yield f"Pod {name} waits for the download of the model."
            return
    for container in status.get("containerStatuses", []):
        yield from _container(name, container)


def _container(pod: str, container: _Object) -> Iterator[str]:
    waiting = container.get("state", {}).get("waiting", {})
    reason = waiting.get("reason", "")
    what = f"Container {container['name']} of pod {pod}"
    if reason in _ADVICE:
        message = _shown(waiting.get("message", ""))
        details = f": {message}" if message else ""
        # A folder that is only read cannot be made by Kubernetes.
        advice = _SUB_PATH_ADVICE if "subPath" in message else _ADVICE[reason]
        yield f"{what} does not start: {reason}{details}; {advice}."
    for state in (container.get("state", {}), container.get("lastState", {})):
        ended = state.get("terminated", {})
        if ended.get("reason") == "OOMKilled":
            advice = ": raise worker.memory" if container["name"] == _WORKER else ""
            yield f"{what} used more memory than its limit{advice}."
            return


def _shown(text: str) -> str:
    return " ".join(text.split())[:_MAX_MESSAGE].rstrip(".")

"""Why a RayService waits, by the status that KubeRay writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagedray.text import pluralize

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_ready", "service_lines"]

# Any: JSON of Kubernetes.
_Object = dict[str, Any]
_MAX_MESSAGE = 400
_IS_FINAL = {
    "ValidationFailed": "KubeRay rejects it",
    "InitializingTimeout": "It did not start in time, and KubeRay has stopped trying",
}
_APPLICATIONS = {
    "NOT_STARTED": "has not started",
    "DEPLOYING": "starts: its replicas load the model",
    "DEPLOY_FAILED": "failed to start",
    "UNHEALTHY": "is unhealthy",
    "DELETING": "is being deleted",
}
_DEPLOYMENTS = {
    "UPDATING": "starts or replaces replicas",
    "UPSCALING": "adds replicas",
    "DOWNSCALING": "removes replicas",
    "UNHEALTHY": "is unhealthy",
    "DEPLOY_FAILED": "failed to start",
}


def is_ready(service: _Object) -> bool:
    """Return whether the service answers requests."""
    return _condition(service.get("status", {}), "Ready").get("status") == "True"


def service_lines(service: _Object) -> list[str]:
    """Return the state in one line, and a line for each thing that it waits for."""
    name = service["metadata"]["name"]
    status = service.get("status", {})
    waits = list(_waits(service, status))
    if is_ready(service):
        first = f"{name} serves, with {pluralize(status.get('numServeEndpoints', 0), 'pod')}."
    else:
        first = f"{name} does not serve yet."
    return [first, *waits]


def _waits(service: _Object, status: _Object) -> Iterator[str]:
    if "deletionTimestamp" in service["metadata"]:
        yield "It is being deleted."
        return
    if not status:
        yield (
            "KubeRay has not seen it: check that the operator runs and watches this namespace "
            "(kubectl get pods --all-namespaces -l app.kubernetes.io/name=kuberay-operator)."
        )
        return
    ready = _condition(status, "Ready")
    # KubeRay does not record which generation it rejected.
    if (final := _IS_FINAL.get(ready.get("reason", ""))) is not None:
        yield f"{final}: {_text(ready)}."
        return
    generation = service["metadata"].get("generation", 0)
    if status.get("observedGeneration", generation) < generation:
        yield "KubeRay has not seen the last change yet: check the log of the operator."
    if _condition(status, "Suspending").get("status") == "True":
        yield "KubeRay deletes its Ray cluster and service, since it is to be suspended."
        return
    if service.get("spec", {}).get("suspend"):
        yield "It is suspended: set spec.suspend to false to start it."
        return
    yield from _clusters(service, status)


def _clusters(service: _Object, status: _Object) -> Iterator[str]:
    """Yield why the Ray clusters of a service wait: the serving cluster, and its successor."""
    active, pending = (status.get(f"{kind}ServiceStatus", {}) for kind in ("active", "pending"))
    has_active, has_pending = ("rayClusterName" in one for one in (active, pending))
    if not has_active and not has_pending:
        yield "KubeRay has not created a Ray cluster yet: check the log of the operator."
    if has_active and has_pending:
        yield (
            f"An upgrade is in progress: the cluster {active['rayClusterName']} serves until "
            f"{pending['rayClusterName']} is ready."
        )
    if has_pending:
        yield from _cluster(pending)
    if has_active:
        yield from _cluster(active)
        if not has_pending and not is_ready(service) and not status.get("numServeEndpoints"):
            yield (
                "No pod has a Serve proxy that is ready: a replica must run on it "
                "(kubectl get pods -l ray.io/serve=true)."
            )


def _cluster(part: _Object) -> Iterator[str]:
    name, state = part["rayClusterName"], part.get("rayClusterStatus", {})
    failure = _condition(state, "ReplicaFailure")
    if failure.get("status") == "True":
        yield f"Cluster {name}: pods cannot be created: {_text(failure)}."
    elif state.get("reason"):
        yield f"Cluster {name}: {_shown(state['reason'])}."
    head = _condition(state, "HeadPodReady")
    if head.get("status") == "False":
        yield f"Cluster {name}: the head pod is not ready: {_text(head)}."
    wanted = state.get("desiredWorkerReplicas", 0)
    ready = state.get("readyWorkerReplicas", 0)
    if ready < wanted:
        yield f"Cluster {name}: {ready} of {wanted} worker pods are ready."
    applications = part.get("applicationStatuses", {})
    for application, one in sorted(applications.items()):
        yield from _application(application, one)


def _application(name: str, application: _Object) -> Iterator[str]:
    status = application.get("status", "")
    if status in _APPLICATIONS:
        yield f"Application {name} {_APPLICATIONS[status]}{_because(application)}."
    for deployment, one in sorted(application.get("serveDeploymentStatuses", {}).items()):
        what = _DEPLOYMENTS.get(one.get("status", ""))
        if what is not None:
            yield f"Deployment {deployment} {what}{_because(one)}."


def _condition(status: _Object, kind: str) -> _Object:
    found = [one for one in status.get("conditions", []) if one.get("type") == kind]
    return found[0] if found else {}


def _because(part: _Object) -> str:
    message = _shown(part.get("message", ""))
    return f": {message}" if message else ""


def _text(condition: _Object) -> str:
    return _shown(condition.get("message") or condition.get("reason") or "no reason is given")


def _shown(text: str) -> str:
    """Return a text in one line, or the end of a long text, where a traceback names its error."""
    line = " ".join(text.split())
    line = line if len(line) <= _MAX_MESSAGE else f"...{line[-_MAX_MESSAGE:]}"
    return line.rstrip(".")

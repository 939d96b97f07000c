"""The Ray cluster of `cpu-demo` from the image: a head and a worker, without Kubernetes.

The chart renders it, with a disk for prefixes, which the values of `cpu-demo` do not have.

It starts the pods and sends the Serve configuration as KubeRay's controller does.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import httpx
import yaml

from cluster.serving.auth import digest_of, new_key
from tests.deploy.helm.chart import render_chart
from tests.deploy.kustomize import overlay
from tests.image.built_image import BuiltImage
from tests.image.kuberay import CLUSTER, HEAD_SERVICE, head_pod, worker_pod
from tests.image.pod import Pod
from tests.image.pod_network import make_network

if TYPE_CHECKING:
    from pathlib import Path

    from tests.deploy.kustomize import Manifest

__all__ = ["IMAGE", "RayCluster", "wait_until"]

_DEPLOY_TIMEOUT_S = 180.0


@cache
def _ray_service() -> Manifest:
    manifests = render_chart("cpu-demo", {"diskCache": {"size": "1Gi"}})
    [service] = [one for one in manifests if one["kind"] == "RayService"]
    return service


def _image_name() -> str:
    # Also where Helm is not installed.
    cluster = overlay("cpu-demo")["RayService", "pagedray"]["spec"]["rayClusterConfig"]
    groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
    [name] = {one["template"]["spec"]["containers"][0]["image"] for one in groups}
    return str(name)


IMAGE = _image_name()


"""The name of the image in the manifests."""


@dataclass(frozen=True, slots=True)
class RayCluster:
    """The pods and what clients need to know."""

    head: Pod
    worker: Pod
    token: str
    key: str
    image: BuiltImage

    @classmethod
    def make(cls, folder: Path) -> RayCluster:
        """Prepare the pods, which `start` starts."""
        make_network()
        image = BuiltImage.mount(IMAGE)
        token, key = secrets.token_hex(32), new_key()
        keys = f'[tenants.demo]\nkeys = ["sha256:{digest_of(key).hex()}"]\n'
        values = {CLUSTER: {"auth_token": token}, "pagedray-api-keys": {"keys.toml": keys}}
        service, images = _ray_service(), {IMAGE: image}
        head = Pod(head_pod(service), images, values, folder / "head", number=2)
        names = {HEAD_SERVICE: head.address}
        worker = Pod(worker_pod(service), images, values, folder / "worker", number=3, names=names)
        return cls(head, worker, token, key, image)

    def start(self) -> None:
        """Start both pods and wait until the head is ready, as KubeRay does."""
        self.head.start()
        wait_until(self.head, "startupProbe")
        wait_until(self.head, "readinessProbe")
        self.worker.start()
        wait_until(self.worker, "startupProbe")

    def put_serve_config(self, token: str | None) -> httpx.Response:
        """Send the Serve configuration of the manifest with a token."""
        config = yaml.safe_load(_ray_service()["spec"]["serveConfigV2"])
        return httpx.put(
            f"{self._dashboard}/api/serve/applications/",
            content=json.dumps(config),
            headers={"Content-Type": "application/json", **_authorization(token)},
            timeout=30.0,
        )

    def list_nodes(self, token: str | None) -> httpx.Response:
        """Ask the dashboard for the nodes of the cluster with a token."""
        return httpx.get(
            f"{self._dashboard}/api/v0/nodes?detail=1", headers=_authorization(token), timeout=30.0
        )

    def wait_for_application(self) -> float:
        """Wait until Serve reports the application as running, and return the seconds."""
        started_s = time.monotonic()
        while True:
            answer = httpx.get(
                f"{self._dashboard}/api/serve/applications/?api_type=declarative",
                headers=_authorization(self.token),
                timeout=30.0,
            )
            [application] = answer.raise_for_status().json()["applications"].values()
            seconds = time.monotonic() - started_s
            if application["status"] == "RUNNING":
                return seconds
            for pod in (self.head, self.worker):
                pod.assert_running()
            assert seconds < _DEPLOY_TIMEOUT_S, application
            time.sleep(1.0)

    def kill(self) -> None:
        """End all pods at once."""
        for pod in (self.worker, self.head):
            pod.kill()

    @property
    def _dashboard(self) -> str:
        return f"http://{self.head.address}:8265"


def _authorization(token: str | None) -> dict[str, str]:
    return {} if token is None else {"x-ray-authorization": f"Bearer {token}"}


def probe(pod: Pod, name: str) -> bool:
    """Return whether a probe of the manifest succeeds."""
    declared = pod.container[name]
    port = _port(pod, declared["httpGet"]["port"])
    url = f"http://{pod.address}:{port}{declared['httpGet']['path']}"
    try:
        status = httpx.get(url, timeout=declared["timeoutSeconds"]).status_code
    except httpx.TransportError:
        return False
    return 200 <= status < 400


def wait_until(pod: Pod, name: str, timeout_s: float | None = None) -> float:
    """Wait for a probe to succeed and return the seconds that it took.

    A container has as long as the probe allows, unless `timeout_s` is given.
    """
    declared = pod.container[name]
    allowed_s = declared["periodSeconds"] * declared["failureThreshold"]
    started_s = time.monotonic()
    while not probe(pod, name):
        pod.assert_running()
        seconds = time.monotonic() - started_s
        assert seconds < (timeout_s or allowed_s), f"the {name} of {pod.name} fails for {seconds} s"
        time.sleep(0.5)
    return time.monotonic() - started_s


def _port(pod: Pod, name: str) -> int:
    [port] = [one["containerPort"] for one in pod.container["ports"] if one["name"] == name]
    return int(port)

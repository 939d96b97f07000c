"""Probes of containers over HTTP, as the kubelet makes them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from tests.image.pod import Pod

__all__ = ["probe", "wait_until"]


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

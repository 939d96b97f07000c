"""A network of pods on this machine only: a bridge, and a network namespace for each pod.

It is made in the network namespace of the tests, which has no way out.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["add_to_network", "make_network"]

_BRIDGE = "pods"
_SUBNET = "10.244.0"
_NAMESPACES = Path("/run/netns")
"""Where `ip netns` keeps them. Mounted over, so that they end with the tests."""


def make_network() -> None:
    """Make the bridge, through which the tests reach the pods."""
    _NAMESPACES.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(_NAMESPACES)], check=True)
    _ip("link", "set", "lo", "up")
    _ip("link", "add", _BRIDGE, "type", "bridge")
    _ip("addr", "add", f"{_SUBNET}.1/24", "dev", _BRIDGE)
    _ip("link", "set", _BRIDGE, "up")


def add_to_network(name: str, number: int) -> tuple[Path, str]:
    """Make the network namespace of a pod and return its path and address."""
    address = f"{_SUBNET}.{number}"
    _ip("netns", "add", name)
    outside = f"veth{number}"
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", outside, "master", _BRIDGE, "up")
    for command in (
        ("addr", "add", f"{address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("link", "set", "lo", "up"),
    ):
        _ip("-netns", name, *command)
    return _NAMESPACES / name, address


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)

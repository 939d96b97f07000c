"""Spare processes, which have imported their libraries and wait to take the place of a rank.

Starting a process and importing torch and the kernel libraries takes seconds, most of the time that
a new rank needs. A spare process sees every GPU of its node and uses no GPU until it replaces a
rank.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

if TYPE_CHECKING:
    from cluster.engine.ranks.rank_places import Actor, RankPlaces

__all__ = ["SpareRanks"]

_PING_TIMEOUT_S = 1.0


class SpareRanks:
    """The spares of a group, by node."""

    def __init__(self, num_per_node: int) -> None:
        self._num_per_node = num_per_node
        self._device_of: dict[tuple[str, int], str] = {}
        """The device that Ray assigned to each rank, by node and rank."""
        # Any: a reference of Ray.
        self._spares: dict[str, list[tuple[Actor, Any]]] = defaultdict(list)
        """Each with the reference that resolves when its imports are done."""

    def note_devices(self, ranks: list[Actor], places: RankPlaces) -> None:
        """Ask the ranks of the first epoch which devices Ray has assigned to their bundles."""
        if self._num_per_node:
            devices = ray.get([actor.visible_devices.remote() for actor in ranks])
            for rank, (node, device) in enumerate(zip(places.nodes, devices, strict=True)):
                self._device_of[node, rank] = device

    def fill(self, places: RankPlaces) -> None:
        """Start the spares that are missing; returns before they have started."""
        if not self._num_per_node:
            return
        for node in set(places.nodes):
            spares = self._spares[node]
            spares[:] = (spare for spare in spares if _is_alive(*spare))
            while len(spares) < self._num_per_node:
                actor = places.start_spare(node)
                visible = ",".join(self._devices_of(node))
                spares.append((actor, actor.import_libraries.remote(visible)))

    def take(self, rank: int, places: RankPlaces) -> tuple[Actor, int] | None:
        """Return a spare on the node of a rank, and the index of the rank's device in the spare.

        None if there is no spare. The caller ends the spare.
        """
        node = places.nodes[rank]
        # Ray may have moved the bundle to another node.
        device = self._device_of.get((node, rank))
        spares = self._spares[node]
        while spares and device is not None:
            actor, imported = spares.pop(0)
            if _is_alive(actor, imported):
                return actor, self._devices_of(node).index(device)
            ray.kill(actor)
        return None

    def close(self) -> None:
        """End every spare."""
        for spares in self._spares.values():
            for actor, _ in spares:
                ray.kill(actor)
        self._spares.clear()

    def _devices_of(self, node: str) -> list[str]:
        """Return the devices of the ranks on a node, each once; on CPUs all of them are empty."""
        devices = (device for (place, _), device in self._device_of.items() if place == node)
        return list(dict.fromkeys(devices))


def _is_alive(actor: Actor, imported: Any) -> bool:  # Any: a reference of Ray
    """Return whether a spare lives; a starting spare counts."""
    finished, _ = ray.wait([imported], timeout=0)
    if not finished:
        return True
    try:
        ray.get(imported)
        ray.get(actor.load_progress.remote(), timeout=_PING_TIMEOUT_S)
    except RayError:
        return False
    return True

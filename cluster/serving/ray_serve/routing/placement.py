"""Chooses the replica of a request: sticky by key, bounded by load.

Without Ray. The cost of a choice hardly grows with the number of replicas: what has to be computed
for each replica is computed for all of them at once.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from cluster.serving.ray_serve.routing.affinity import named_replica
from cluster.serving.ray_serve.routing.last_served import LastServed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from cluster.serving.ray_serve.routing.affinity import RoutingKey

__all__ = ["DEFAULT_CALL_LOAD", "DEFAULT_CALM", "DEFAULT_SLACK", "MAX_CHOICES", "Placement"]

DEFAULT_SLACK = 1.5
DEFAULT_CALM = 0.25
DEFAULT_CALL_LOAD = 0.01
"""Load that a request adds to its replica until the replica reports it."""

MAX_CHOICES = 8
"""Replicas from which a request without a key, or a rejected request, chooses the least loaded."""


class Placement:
    """The replicas of one router, and where its requests go.

    A key belongs to the replica with the highest score for it, by rendezvous hashing (Thaler and
    Ravishankar, 1998). Adding or removing another replica does not change that.
    """

    def __init__(
        self,
        *,
        draws: Random,
        slack: float = DEFAULT_SLACK,
        calm: float = DEFAULT_CALM,
        most_keys: int = 16_384,
    ) -> None:
        """A key may use replicas with a load of at most `slack` times the mean, or of `calm`.

        Of at most `most_keys` keys that load moved, it is remembered where to.
        """
        self._slack = slack
        self._calm = calm
        self._draws = draws
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        self._hashes = np.zeros(0, np.uint64)
        self._loads = np.zeros(0)
        self._last_served = LastServed(most_keys)

    @property
    def loads(self) -> dict[str, float]:
        """The loads as they are known."""
        return dict(zip(self._names, self._loads.tolist(), strict=True))

    def set_replicas(self, loads: Mapping[str, float]) -> None:
        """Take the current replicas and their loads."""
        if loads.keys() != self._places.keys():
            self._names = list(loads)
            self._places = {name: place for place, name in enumerate(self._names)}
            self._hashes = np.array([_hash(name) for name in self._names], np.uint64)
        self._loads = np.array([loads[name] for name in self._names])

    def add_load(self, name: str, load: float) -> None:
        """Add a load to a replica, if it is known, until the next `set_replicas`."""
        place = self._places.get(name)
        if place is not None:
            self._loads[place] += load

    def choose_replicas(self, key: RoutingKey | None) -> list[str]:
        """Return up to `MAX_CHOICES` replicas in the order in which to try them, none if empty.

        The first is the replica that served the key last, the replica that the key belongs to, or
        the replica within the bound of load that the key prefers then; without a key it is the
        least loaded of some replicas drawn at random. The others are drawn, and follow by load.
        """
        number = min(len(self._names), MAX_CHOICES)
        drawn = self._draws.sample(range(len(self._names)), number)
        drawn.sort(key=self._loads.item)
        if key is not None and drawn:
            first = self._place_of(key)
            drawn = [first, *(place for place in drawn if place != first)][:number]
        return [self._names[place] for place in drawn]

    def _place_of(self, key: RoutingKey) -> int:
        loads = self._loads
        bound = max(self._slack * float(loads.mean()), self._calm)
        last = self._places.get(self._last_served.find_replica(key) or "")
        if last is not None and loads[last] <= bound:
            self._last_served.note_replica(key, self._names[last])
            return last
        named = self._places.get(named_replica(key.text) or "")
        scores = _mixed(self._hashes ^ np.uint64(_hash(key.text)))
        own = int(scores.argmax()) if named is None else named
        if loads[own] <= bound:
            self._last_served.forget(key)
            return own
        # A load that equals the mean may be rounded to more.
        scores[loads > max(bound, float(loads.min()))] = 0
        place = int(scores.argmax())
        if named is None:
            # Requests of many conversations name one replica.
            self._last_served.note_replica(key, self._names[place])
        return place


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mixed(values: np.ndarray) -> np.ndarray:
    """Return a well-mixed number for each, the finalizer of SplitMix64 (Steele et al., 2014)."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values

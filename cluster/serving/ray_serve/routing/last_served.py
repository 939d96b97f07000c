"""Remembers which replica served the requests of a key last, if it is not the key's own.

Plain Python without Ray. The replica of most keys follows from the key, so nothing has to be
remembered for them: these are keys with requests that were moved because of load.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.serving.ray_serve.routing.affinity import RoutingKey

__all__ = ["LastServed"]


class LastServed:
    """The replicas of recently used keys, separate for each owner.

    Requests of another owner must not decide where a request goes, since its sender could find out.
    A key takes about 200 bytes.
    """

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def find_replica(self, key: RoutingKey) -> str | None:
        """Return the replica of a key's last request; None if it is not known."""
        return self._replicas.get(_digest(key)) if self._replicas else None

    def note_replica(self, key: RoutingKey, replica: str) -> None:
        """Remember the replica of a key, and forget that of the key used longest ago."""
        if not key.owner:
            return
        digest = _digest(key)
        self._replicas[digest] = replica
        self._replicas.move_to_end(digest)
        if len(self._replicas) > self._most_keys:
            self._replicas.popitem(last=False)

    def forget(self, key: RoutingKey) -> None:
        """Forget the replica of a key, if it is remembered."""
        if self._replicas:
            self._replicas.pop(_digest(key), None)


def _digest(key: RoutingKey) -> bytes:
    # Session ids may be long, and memory is bounded.
    text = key.as_session_id().encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()

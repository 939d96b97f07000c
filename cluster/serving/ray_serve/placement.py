"""Chooses the replica of a request: sticky by key, bounded by load.

Without Ray. The cost of a choice hardly grows with the number of replicas: what has to be computed
for each replica is computed for all of them at once.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from cluster.serving.inputs import Prompt

__all__ = [
    "DEFAULT_CALL_LOAD",
    "DEFAULT_CALM",
    "DEFAULT_SLACK",
    "MAX_CHOICES",
    "MAX_KEY_MESSAGES",
    "MAX_KEY_TOKENS",
    "LastServed",
    "Owners",
    "Placement",
    "RoutingKey",
    "prefix_key",
    "replica_key",
]

DEFAULT_SLACK = 1.5
DEFAULT_CALM = 0.25
DEFAULT_CALL_LOAD = 0.01
"""Load that a request adds to its replica until the replica reports it."""
MAX_CHOICES = 8
"""Replicas from which a request without a key, or a rejected request, chooses the least loaded."""

MAX_KEY_MESSAGES = 16
"""Messages of a conversation that a key depends on."""
MAX_KEY_TOKENS = 256
"""Token ids of a prompt that a key depends on."""
_KEY_CHARACTERS = 1024
_REPLICA = "replica-"
_END = "\n"
"""Ends the text of a key in Serve's session id; clients cannot send it in a header."""
_OWNER_BYTES = 16


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


class RoutingKey(NamedTuple):
    """The common property of requests that the same replica serves best."""

    text: str
    owner: str = ""
    """The owner of the requests, as `Owners` says; empty if not known."""

    def as_session_id(self) -> str:
        """Return the key as the session id of Serve's requests."""
        return f"{self.text}{_END}{self.owner}" if self.owner else self.text

    @classmethod
    def of_session_id(cls, session_id: str) -> RoutingKey:
        """Return the key in a session id: a proxy's extension made it, or the client did."""
        text, _, owner = session_id.partition(_END)
        return cls(text, owner)


class Owners:
    """Distinguishes the senders of requests by digests that do not reveal their credentials."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(_OWNER_BYTES)

    def owner_of(self, credential: str | None) -> str:
        """Return the same for equal credentials of one instance; None is a sender without any."""
        given = "" if credential is None else f"={credential}"
        digest = hashlib.blake2b(
            given.encode(errors="surrogatepass"), digest_size=_OWNER_BYTES, key=self._secret
        )
        return digest.hexdigest()


def replica_key(name: str) -> str:
    """Return the key of requests that a replica serves best, such as requests with its state."""
    return f"{_REPLICA}{name}"


def named_replica(key: str) -> str | None:
    """Return the replica that a key names; None for other keys."""
    return key.removeprefix(_REPLICA) if key.startswith(_REPLICA) else None


def prefix_key(prompt: Prompt | Sequence[int] | Sequence[Mapping[str, object]]) -> str | None:
    """Return a key that is equal for prompts with a common prefix; None for an empty prompt.

    It is also None for token ids that are not integers, which the replica rejects. The
    prefix is the beginning of a text or of token ids, or a conversation up to its first user
    message, which every later turn repeats.
    """
    if isinstance(prompt, str):
        given = prompt[:_KEY_CHARACTERS]
    elif not isinstance(prompt, list | tuple):
        given = _conversation(getattr(prompt, "messages", ()))
    elif prompt and isinstance(prompt[0], int):
        return _key_of_tokens(prompt[:MAX_KEY_TOKENS])
    else:
        given = _conversation(prompt)
    return _key_of(given.encode(errors="surrogatepass")) if given else None


def _key_of_tokens(token_ids: Sequence[int]) -> str | None:
    try:
        return _key_of(msgspec.json.encode(token_ids))
    except (OverflowError, TypeError, ValueError):
        return None


def _conversation(messages: Sequence[object]) -> str:
    parts = []
    for message in messages[:MAX_KEY_MESSAGES]:
        role, content = _read(message, "role"), _read(message, "content")
        parts.append(f"{role}\0{str(content)[:_KEY_CHARACTERS]}\0")
        if role == "user":
            break
    return "".join(parts)


def _read(message: object, name: str) -> object:
    return message.get(name) if isinstance(message, dict) else getattr(message, name, None)


def _key_of(prefix: bytes) -> str:
    return f"prefix-{hashlib.blake2b(prefix, digest_size=8).hexdigest()}"

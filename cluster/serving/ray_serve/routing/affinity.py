"""Chooses the replica of a request: sticky by key, bounded by load.

Plain Python without Ray; keys have no meaning here.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.serving.inputs import Prompt

__all__ = [
    "MAX_KEY_MESSAGES",
    "MAX_KEY_TOKENS",
    "prefix_key",
    "rendezvous_order",
    "replica_key",
    "routing_order",
]

MAX_KEY_MESSAGES = 16
"""Messages of a conversation that a key depends on."""
MAX_KEY_TOKENS = 256
"""Token ids of a prompt that a key depends on."""
_KEY_CHARACTERS = 1024
_REPLICA = "replica-"


def replica_key(name: str) -> str:
    """Return the key of requests that one replica serves best, such as one with their state."""
    return f"{_REPLICA}{name}"


def rendezvous_order(key: str, ids: Sequence[str]) -> list[str]:
    """Return `ids` in the order of `key` by rendezvous hashing, one that `key` names first.

    Adding or removing an id does not change the order of the others.
    """

    def rank(one: str) -> tuple[bool, bytes]:
        return replica_key(one) == key, _digest(f"{one}\0{key}")

    return sorted(ids, key=rank, reverse=True)


def routing_order(
    key: str | None, loads: Mapping[str, float], *, slack: float, calm: float
) -> list[str]:
    """Return all replicas in the order in which to try them.

    The first is the first in the key's order with a load of at most `slack` times the mean, or of
    at most `calm`; without a key it is the least loaded. The others follow by load.
    """
    by_load = sorted(loads, key=lambda one: (loads[one], one))
    if key is None or not by_load:
        return by_load
    bound = max(slack * sum(loads.values()) / len(loads), calm)
    chosen = next(
        (one for one in rendezvous_order(key, by_load) if loads[one] <= bound), by_load[0]
    )
    return [chosen, *(one for one in by_load if one != chosen)]


def prefix_key(
    prompt: Prompt | Sequence[int] | Sequence[Mapping[str, object]],
) -> str | None:
    """Return a key that is equal for prompts with a common prefix; None for an empty prompt.

    The prefix is the beginning of a text or of token ids, or a conversation up to its first user
    message, which every later turn repeats.
    """
    if isinstance(prompt, str):
        given = prompt[:_KEY_CHARACTERS]
    elif not isinstance(prompt, list | tuple):
        given = _conversation(getattr(prompt, "messages", ()))
    elif prompt and isinstance(prompt[0], int):
        given = ",".join(map(str, prompt[:MAX_KEY_TOKENS]))
    else:
        given = _conversation(prompt)
    return f"prefix-{_digest(given).hex()}" if given else None


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


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()

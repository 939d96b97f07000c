"""The routing key, which requests share that one replica serves best, and the owner of a request.

Plain Python without Ray. It does not know how a replica is chosen.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from cluster.serving.inputs import Prompt

__all__ = [
    "MAX_KEY_MESSAGES",
    "MAX_KEY_TOKENS",
    "Owners",
    "RoutingKey",
    "named_replica",
    "prefix_key",
    "replica_key",
]

MAX_KEY_MESSAGES = 16
"""Messages of a conversation that a key depends on."""
MAX_KEY_TOKENS = 256
"""Token ids of a prompt that a key depends on."""
_KEY_CHARACTERS = 1024
_REPLICA = "replica-"
_END = "\n"
"""Ends the text of a key in Serve's session id; clients cannot send it in a header."""
_OWNER_BYTES = 16


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


def prefix_key(
    prompt: Prompt | Sequence[int] | Sequence[Mapping[str, object]],
) -> str | None:
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

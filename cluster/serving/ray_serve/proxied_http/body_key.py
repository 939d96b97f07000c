"""The routing key of a request, from its body."""

from __future__ import annotations

import msgspec

from cluster.serving.ray_serve.routing.affinity import prefix_key, replica_key
from cluster.serving.responses.stored_responses import replica_of

__all__ = ["key_of_body"]


class _Prompt(msgspec.Struct):
    """The parts of a request body that identify its prompt."""

    prompt: str | list[int] | None = None
    messages: list[dict[str, object]] | None = None
    input: str | list[dict[str, object]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    session_id: str | None = None

    def key(self) -> str | None:
        """Return the routing key."""
        if self.session_id:
            return self.session_id
        replica = replica_of(self.previous_response_id or "")
        if replica is not None:
            return replica_key(replica)
        if self.input is None:
            return prefix_key(self.messages or self.prompt or "")
        given = [{"content": self.input}] if isinstance(self.input, str) else self.input
        return prefix_key([{"content": self.instructions}, *given])


def key_of_body(body: bytes) -> str | None:
    """Return the routing key of a request, or None if its body is not valid."""
    try:
        prompt = msgspec.json.decode(body, type=_Prompt)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # The replica rejects it with the same error as every frontend.
        return None
    return prompt.key()

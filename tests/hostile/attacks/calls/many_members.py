"""An object with thousands of members in a field that is not supported."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["ManyMembers"]

_NUM_MEMBERS = 16_000


class ManyMembers(PostFlood):
    """Names and values that the parser makes before they are rejected."""

    name = "16000 members of metadata"
    path = "/v1/chat/completions"

    def body(self) -> bytes:
        """Return a chat request."""
        members = b",".join(b'"k%d":"v"' % index for index in range(_NUM_MEMBERS))
        return (
            b'{"model":"tiny-llama","messages":[{"role":"user","content":"x"}],"metadata":{%b}}'
            % members
        )

"""Lists of documents to rerank, on a server whose model does not score."""

from __future__ import annotations

from tests.hostile.floods.post_flood import PostFlood

__all__ = ["ManyPairs"]

_NUM_DOCUMENTS = 2048


class ManyPairs(PostFlood):
    """As many documents as a call may have."""

    name = "2048 documents to rerank"
    path = "/rerank"

    def body(self) -> bytes:
        """Return a request."""
        documents = b",".join([b'{"text":"%b"}' % (b"x " * 480)] * _NUM_DOCUMENTS)
        return b'{"model":"tiny-llama","query":"x","documents":[%b]}' % documents

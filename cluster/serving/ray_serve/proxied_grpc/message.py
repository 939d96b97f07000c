"""A message from Ray Serve's gRPC proxy to a replica, which clients cannot send."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cluster.serving.continuation import Continuation

__all__ = ["TIMEOUT_KEY", "ProxiedMessage"]

TIMEOUT_KEY = "pagedray-timeout-ms"
"""The metadata key of a call's remaining time, which Serve does not pass to replicas."""


class ProxiedMessage(NamedTuple):
    """The message of a call, with the data that keeps the call the same in any replica.

    Clients cannot send such a message: Serve decodes their messages as bytes.
    """

    body: bytes
    continuation: Continuation

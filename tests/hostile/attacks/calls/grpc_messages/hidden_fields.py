"""gRPC messages that hide fields in a group, which parsers skip without a limit of their number."""

from __future__ import annotations

from pagedray.v1 import pagedray_pb2 as pb
from tests.hostile.floods.call_flood import CallFlood

__all__ = ["HiddenFields"]

_NUM_FIELDS = 500_000
# A group of the unknown field 100, and one field in it.
_GROUP, _GROUP_END = b"\xa3\x06", b"\xa4\x06"
_FIELD = b"\x08\x01"


class HiddenFields(CallFlood):
    """A request that is valid without the group in its sampling parameters."""

    name = "500000 fields in a group"

    def body(self) -> bytes:
        """Return a Generate request."""
        hidden = pb.SamplingParams.FromString(_GROUP + _FIELD * _NUM_FIELDS + _GROUP_END)
        hidden.max_tokens = 1
        return pb.GenerateRequest(text="x", sampling=hidden).SerializeToString()

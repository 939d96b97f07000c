"""The options of a streamed response."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from cluster.serving.schema.body import BodyPart

__all__ = ["StreamOptions"]


class StreamOptions(BodyPart):
    """The options of a stream."""

    include_usage: bool = Field(False, description="Whether the last chunk reports the usage.")
    continuous_usage_stats: bool = Field(
        False, description="Whether every chunk reports the usage so far."
    )
    include_obfuscation: Literal[False] = Field(
        False, description="Chunks are never padded with random characters."
    )
    resumable: bool = Field(
        False,
        description="Whether the stream is kept after its connection is cut, so that the client "
        "can resume it. Its events have ids.",
    )

"""A file of a model in S3."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RemoteFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its bucket lists it."""

    name: str
    """Its path below the prefix of the model."""
    size: int
    etag: str
    """Changes with the content."""

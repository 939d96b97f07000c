"""A file of a model in S3."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

__all__ = ["RemoteFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file as its bucket lists it."""

    name: str
    """The path of the file below the prefix of the model."""
    size: int
    etag: str
    """Changes with the content."""

    @property
    def is_inside(self) -> bool:
        """Whether its path stays below the folder that it is relative to."""
        path = PurePosixPath(self.name)
        return not path.is_absolute() and ".." not in path.parts

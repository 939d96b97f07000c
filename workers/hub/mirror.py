"""A folder for a model downloaded from S3, with a record of its completeness.

`.pagedray` in the folder records each complete file, and whether all files are complete. Files are
received in `.pagedray` and moved to their place when they have their size, so the folder itself has
no partial file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec
from filelock import FileLock

from pagedray.errors import CheckpointError
from workers.hub.model_name import is_side_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["S3_SCHEME", "Mirror", "RemoteFile", "S3Location", "parse_location"]

S3_SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PREFIX = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]*(/[A-Za-z0-9_][A-Za-z0-9_.=+-]*)*")


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


class _Record(msgspec.Struct):
    """The record of a folder."""

    files: list[RemoteFile]
    is_complete: bool


_decoder = msgspec.json.Decoder(_Record)


class Mirror:
    """The local copy of a model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._notes = folder / ".pagedray"
        self._record = self._notes / "files.json"
        self._lock = threading.Lock()
        self._files: dict[str, RemoteFile] = {}
        self._is_complete = False
        self._read()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time download into the folder."""
        self._notes.mkdir(parents=True, exist_ok=True)
        with FileLock(self._notes / "lock"):
            self._read()
            yield

    def problem(self) -> str | None:
        """Return why the model cannot be used, or None if all of its files are there."""
        self._read()
        if not self._is_complete:
            return f"{self.folder} is not complete"
        for file in self._files.values():
            if self._size(file) != file.size:
                return f"{file.name!r:.200} in {self.folder} does not have {file.size} bytes"
        return None

    def mirrors(self, listing: Iterable[RemoteFile]) -> bool:
        """Return whether the folder has all files that the bucket lists."""
        listed = {file.name: file for file in listing}
        are_same = all(listed.get(name) == file for name, file in self._files.items())
        # A file that was added to the bucket later is not among ours.
        has_sides = all(name in self._files for name in listed if is_side_file(name))
        return are_same and has_sides and self.problem() is None

    def begin(self) -> None:
        """Note that the model is not complete from here on."""
        self._is_complete = False
        self._write()

    def finish(self, files: Iterable[RemoteFile]) -> None:
        """Note that these files are the whole model, and remove leftovers of others."""
        others = dict(self._files)
        self._files = {file.name: file for file in files}
        # Another version's chat template, for example, would be used.
        for name, other in others.items():
            if name not in self._files and other.is_inside:
                (self.folder / name).unlink(missing_ok=True)
        self._is_complete = True
        self._write()
        for part in self._notes.rglob("*.part"):
            part.unlink(missing_ok=True)

    def has_file(self, file: RemoteFile) -> bool:
        """Return whether a file is there as the bucket lists it."""
        return self._files.get(file.name) == file and self._size(file) == file.size

    def check_space(self, files: Iterable[RemoteFile]) -> None:
        """Raise CheckpointError if files do not fit on the disk."""
        missing = [file for file in files if not self.has_file(file)]
        needed = sum(max(file.size - self.received(file), 0) for file in missing)
        free = shutil.disk_usage(self._notes).free
        if needed > free:
            raise CheckpointError(
                f"{self.folder} needs {needed / 1e9:.2f} GB more, but has only {free / 1e9:.2f} GB "
                "free; use a larger volume."
            )

    def received(self, file: RemoteFile) -> int:
        """Return how many bytes of a file an earlier download has left."""
        try:
            return self._part(file).stat().st_size
        except OSError:
            return 0

    def append(self, file: RemoteFile, content: bytes) -> None:
        """Add the next bytes of a file."""
        part = self._part(file)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as stream:
            stream.write(content)

    def drop(self, file: RemoteFile) -> None:
        """Forget the bytes of a file that were received."""
        self._part(file).unlink(missing_ok=True)

    def accept(self, file: RemoteFile) -> None:
        """Move a file that was received to its place."""
        place = self.folder / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        part = self._part(file)
        if not file.size:
            self.append(file, b"")
        with part.open("rb") as stream:
            os.fsync(stream.fileno())
        part.replace(place)
        with self._lock:
            self._files[file.name] = file
            self._write()

    def _part(self, file: RemoteFile) -> Path:
        # Bytes of another version of the file are not continued.
        version = hashlib.sha256(f"{file.etag} {file.size}".encode()).hexdigest()[:16]
        return self._notes / f"{file.name}.{version}.part"

    def _size(self, file: RemoteFile) -> int | None:
        try:
            return (self.folder / file.name).stat().st_size
        except (OSError, ValueError):
            # No file has a name with a zero byte.
            return None

    def _read(self) -> None:
        try:
            record = _decoder.decode(self._record.read_bytes())
        except (OSError, ValueError):
            record = _Record(files=[], is_complete=False)
        self._files = {file.name: file for file in record.files}
        self._is_complete = record.is_complete

    def _write(self) -> None:
        files = [asdict(file) for file in self._files.values()]
        temporary = self._record.with_suffix(".new")
        with temporary.open("w") as stream:
            json.dump({"files": files, "is_complete": self._is_complete}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        # Readers see the old or the new record, never a part.
        temporary.replace(self._record)


@dataclass(frozen=True, slots=True)
class S3Location:
    """Where the files of a model are."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{S3_SCHEME}{self.bucket}/{self.prefix}"


def parse_location(text: str) -> S3Location:
    """Return the bucket and prefix that `text` names. Raises CheckpointError."""
    bucket, _, prefix = text.removeprefix(S3_SCHEME).rstrip("/").partition("/")
    is_valid = text.startswith(S3_SCHEME) and _BUCKET.fullmatch(bucket) and ".." not in text
    if not is_valid or not _PREFIX.fullmatch(prefix):
        raise CheckpointError(
            f"{text!r:.200} is not a folder in S3; write s3://BUCKET/PREFIX, with letters, digits "
            "and '_', '-', '.', '=', '+' in each part of the prefix."
        )
    return S3Location(bucket, prefix)

"""Downloads a model from S3 into a folder, where an earlier download of it is continued."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from workers.hub.needed_files import is_side_file
from workers.s3.mirror import Mirror
from workers.weights.tensor_entries import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from workers.s3.bucket import Bucket
    from workers.s3.location import S3Location
    from workers.s3.remote_file import RemoteFile

__all__ = ["CHUNK_BYTES", "fetch_folder"]

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 * 2**20
"""Bytes of a request, and the most that a killed process downloads again."""
_NUM_THREADS = 4


def fetch_folder(
    location: S3Location,
    folder: Path,
    bucket: Bucket,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    report_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder with all files of the model that PagedRay reads. Raises CheckpointError.

    `report_progress` is called with the bytes received, and of all files to download.
    """
    listing = bucket.list_files()
    if "config.json" not in {file.name for file in listing}:
        raise CheckpointError(
            f"{location} has no config.json; a model must be a checkpoint in the format of "
            "transformers."
        )
    try:
        mirror = Mirror(folder)
        with mirror.locked():
            if not mirror.mirrors(listing):
                transfer = _Transfer(mirror, bucket, chunk_bytes, report_progress)
                _download(location, mirror, transfer, listing)
    except OSError as error:
        raise CheckpointError(
            f"{location} cannot be stored in {folder}: {error.strerror or error}."
        ) from error
    return folder


def _download(
    location: S3Location,
    mirror: Mirror,
    transfer: _Transfer,
    listing: Sequence[RemoteFile],
) -> None:
    mirror.begin()
    sides = [file for file in listing if is_side_file(file.name)]
    transfer.run(sides)
    weights = _weights(location, mirror.folder, listing)
    transfer.run(weights)
    mirror.finish([*sides, *weights])
    size = sum(file.size for file in (*sides, *weights))
    logger.info("Downloaded %s: %.2f GB in %s.", location, size / 1e9, mirror.folder)


def _weights(location: S3Location, folder: Path, listing: Sequence[RemoteFile]) -> list[RemoteFile]:
    listed = {file.name: file for file in listing}
    names = weight_files(folder, listed)
    if not names:
        raise CheckpointError(
            f"{location} has no model.safetensors and no model.safetensors.index.json; weights in "
            "other formats are not supported, and pickled ones (*.bin) are never loaded."
        )
    for name in names:
        if name not in listed or not listed[name].is_inside:
            raise CheckpointError(
                f"{location} has no {name!r:.200}, which its model.safetensors.index.json lists."
            )
    return [listed[name] for name in names]


class _Transfer:
    """Downloads files, several at a time."""

    def __init__(
        self,
        mirror: Mirror,
        bucket: Bucket,
        chunk_bytes: int,
        report_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._mirror = mirror
        self._bucket = bucket
        self._chunk_bytes = chunk_bytes
        self._report_progress = report_progress
        self._lock = threading.Lock()
        self._received = 0
        self._total = 0
        self._is_ended = False

    def run(self, files: Sequence[RemoteFile]) -> None:
        """Bring files to their place. Raises CheckpointError and OSError."""
        missing = [file for file in files if not self._mirror.has_file(file)]
        self._mirror.check_space(missing)
        self._total += sum(file.size for file in missing)
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="pagedray-s3") as pool:
            calls = [pool.submit(self._fetch, file) for file in missing]
            try:
                for call in calls:
                    call.result()
            finally:
                self._is_ended = True
                pool.shutdown(cancel_futures=True)
        self._is_ended = False

    def _fetch(self, file: RemoteFile) -> None:
        if self._mirror.received(file) > file.size:
            self._mirror.drop(file)
        have = self._mirror.received(file)
        if have:
            logger.info("Continuing the download of %s after %d bytes.", file.name, have)
            self._note(have)
        while have < file.size and not self._is_ended:
            content = self._bucket.read(file, have, min(have + self._chunk_bytes, file.size))
            if not content:
                raise CheckpointError(
                    f"{file.name} has only {have} bytes, and {file.size} are listed; upload it "
                    "again."
                )
            self._mirror.append(file, content)
            have += len(content)
            self._note(len(content))
        if have == file.size:
            self._mirror.accept(file)

    def _note(self, num_bytes: int) -> None:
        with self._lock:
            self._received += num_bytes
            if self._report_progress is not None:
                self._report_progress(self._received, self._total)

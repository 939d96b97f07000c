"""Lists and reads the files of a model in S3, through obstore, with errors of one line."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store

from pagedray.errors import CheckpointError
from workers.hub.mirror import Mirror, RemoteFile, S3Location
from workers.hub.model_name import is_side_file
from workers.weights.tensor_entries import weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


__all__ = ["Bucket", "fetch_folder"]

logger = logging.getLogger(__name__)

_NUM_TRIES = 8
_MAX_PAUSE_S = 30.0
_REQUEST_TIMEOUT = "5 minutes"
_MAX_REASON = 200
_PASSING = (408, 429)
"""Statuses, besides 500 and above, that are not the fault of the request."""
_KINDS = {
    UnauthenticatedError: 401,
    PermissionDeniedError: 403,
    NotFoundError: 404,
    PreconditionError: 412,
}
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
)
_Answer = TypeVar("_Answer")

CHUNK_BYTES = 32 * 2**20
"""Bytes of a request, and the most that a killed process downloads again."""
_NUM_THREADS = 4


class Bucket:
    """The folder of a model in S3. AWS's environment variables have its credentials and region."""

    def __init__(self, location: S3Location, *, retry_s: float = 1.0) -> None:
        self._location = location
        self._retry_s = retry_s
        self._store = _opened(location)

    def list_files(self) -> list[RemoteFile]:
        """Return all files below the prefix. Raises CheckpointError."""
        return self._retried(self._listed)

    def read(self, file: RemoteFile, first: int, end: int) -> bytes:
        """Return bytes `first` to `end` of a file, without `end`. Raises CheckpointError.

        They are fewer if the server has fewer.
        """

        def read_once() -> bytes:
            found = obstore.get(
                self._store, file.name, options={"range": (first, end), "if_match": file.etag}
            )
            return bytes(found.bytes())

        return self._retried(read_once)

    def _listed(self) -> list[RemoteFile]:
        files = [
            RemoteFile(name=one["path"], size=one["size"], etag=one["e_tag"] or "")
            for batch in obstore.list(self._store)
            for one in batch
        ]
        for file in files:
            # The library would end in a panic, since the tag becomes a header.
            if not (file.etag.isascii() and file.etag.isprintable()):
                raise CheckpointError(
                    f"{self._location} has a file {file.name!r:.200} with an invalid ETag; check "
                    "the endpoint."
                )
        return files

    def _retried(self, call: Callable[[], _Answer]) -> _Answer:
        for num_tries in range(1, _NUM_TRIES + 1):
            try:
                return call()
            except BaseError as error:
                status = _status(error)
                is_final = status is not None and status < 500 and status not in _PASSING
                if is_final or num_tries == _NUM_TRIES:
                    raise _problem(error, status, self._location) from error
            time.sleep(min(self._retry_s * 2**num_tries, _MAX_PAUSE_S))
        raise AssertionError


def _opened(location: S3Location) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
    try:
        return S3Store(
            location.bucket,
            prefix=location.prefix,
            # Without credentials the library would ask the metadata service of EC2.
            skip_signature=not any(name in os.environ for name in _CREDENTIALS),
            client_options={
                "allow_http": endpoint.startswith("http://"),
                "timeout": _REQUEST_TIMEOUT,
            },
            # `Bucket` retries, and knows how much has arrived.
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=0)},
        )
    except BaseError as error:
        raise CheckpointError(
            f"{location} cannot be opened: {_shown(error)}; check the environment variables of "
            "AWS and the certificates of this machine."
        ) from error


def _status(error: BaseError) -> int | None:
    """Return the status of the answer that an exception is of."""
    for kind, status in _KINDS.items():
        if isinstance(error, kind):
            return status
    found = re.search(r"status code: (\d{3})\b", str(error))
    return None if found is None else int(found[1])


def _problem(error: BaseError, status: int | None, location: S3Location) -> CheckpointError:
    match status:
        case 401 | 403:
            said = f"S3 denies access to {location} ({status})"
            advice = "use credentials that may list and read it"
        case 404:
            said = f"{location} does not exist"
            advice = "check the bucket, the prefix, the region and the endpoint"
        case 412:
            said, advice = f"{location} was changed during its download", "start again"
        case 416:
            said = f"{location} has a file that is shorter than the size that its bucket lists"
            advice = "upload it again"
        case 429:
            said, advice = f"S3 limits requests for {location} (429)", "try again later"
        case None:
            said = f"{location} cannot be downloaded: {_shown(error)}"
            advice = "check the network and the endpoint"
        case _:
            said = f"S3 answers with status {status} for {location}"
            advice = "try again later" if status >= 500 else "check the region and the endpoint"
    return CheckpointError(f"{said}; {advice}.")


def _shown(error: BaseException) -> str:
    # The library's details follow its first paragraph.
    summary, _, details = str(error).partition("\n\n")
    texts = [text for text in re.findall(r'"((?:[^"\\]|\\.)*)"', details) if len(text) >= 10]
    whole = ": ".join([summary, *texts[-1:]])
    line = " ".join("".join(one if one.isprintable() else " " for one in whole).split())
    return line[:_MAX_REASON].rstrip(". ")


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
    location: S3Location, mirror: Mirror, transfer: _Transfer, listing: Sequence[RemoteFile]
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

"""Downloads files of a model, several at a time, through huggingface_hub.

The library continues a file after its connection was cut, while the process lives;
`continue_download` continues a file of a killed process. This module limits how long nothing may
arrive, and reports progress.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import threading
import time
from collections import deque
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from filelock import FileLock, Timeout
from huggingface_hub import constants, get_token, hf_hub_download, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils.tqdm import tqdm

from pagedray.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from pagedray.model_config import HubFile, HubRevision
    from workers.hub.model_name import HubName, HubSettings

__all__ = ["HubUnreachableError", "Transfer", "hub_error"]

logger = logging.getLogger(__name__)

_NUM_THREADS = 8
_POLL_S = 0.2
_MAX_REASON = 200
_LIBRARY_LOGGERS = ("huggingface_hub.file_download", "huggingface_hub.utils._http")
_LOCK_S = 0.1

Result = TypeVar("Result")
_ACCESS_ERRORS = {errno.EROFS, errno.EACCES, errno.EPERM}
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO} | _ACCESS_ERRORS


class Transfer:
    """One download of some files."""

    def __init__(
        self, revision: HubRevision, files: Sequence[HubFile], settings: HubSettings
    ) -> None:
        self._revision = revision
        self._settings = settings
        self._waiting = deque(files)
        self._num_threads = min(_NUM_THREADS, len(files))
        self._total = sum(file.size or 0 for file in files)
        self._lock = threading.Lock()
        self._received = 0
        self._heard_s = time.monotonic()
        """When data last arrived."""
        self._is_ended = False

    def run(
        self, verify: Callable[[HubFile], None], report_progress: Callable[[int, int], None]
    ) -> None:
        """Download all files, and call `verify` with each.

        `report_progress` is called with the bytes received, and of all files, and may raise. Raises
        the errors of the library and of `verify`, and TimeoutError if nothing arrives for too long.
        """
        problems = _Problems()
        with problems.noted():
            calls = [_start_call(self._download_files, verify) for _ in range(self._num_threads)]
            try:
                while calls:
                    done, waiting = wait(calls, _POLL_S, FIRST_EXCEPTION)
                    for call in done:
                        call.result()
                    calls = list(waiting)
                    report_progress(min(self._received, self._total), self._total)
                    self._check_silence(problems)
            finally:
                self._is_ended = True

    def note_bytes(self, number: int, *, are_stored: bool) -> None:
        """Note that bytes have arrived. Raises _EndedError once the download was given up.

        Bytes that are not stored belong to a transfer that later becomes parts of a file; they only
        show progress.
        """
        if self._is_ended:
            raise _EndedError
        with self._lock:
            self._received += number if are_stored else 0
            self._heard_s = time.monotonic()

    def _download_files(self, verify: Callable[[HubFile], None]) -> None:
        while not self._is_ended:
            try:
                file = self._waiting.popleft()
            except IndexError:
                return
            bar = _bar_of(self)
            continue_download(self._revision, file, self._settings, bar, self._note_stored)
            hf_hub_download(
                self._revision.id,
                file.name,
                revision=self._revision.commit,
                endpoint=self._settings.endpoint,
                cache_dir=self._settings.cache,
                library_name="pagedray",
                local_files_only=self._settings.is_offline,
                tqdm_class=bar,
            )
            verify(file)
            self._heard_s = time.monotonic()

    def _note_stored(self, number: int) -> None:
        self.note_bytes(number, are_stored=True)

    def _check_silence(self, problems: _Problems) -> None:
        silence_s = time.monotonic() - self._heard_s
        if silence_s > self._settings.silence_s:
            why = f" ({problems.last})" if problems.last else ""
            raise TimeoutError(f"nothing was received for {silence_s:.0f} s{why}")


class _EndedError(Exception):
    """The download was given up."""


def _bar_of(transfer: Transfer) -> type[tqdm]:
    """Return a class of the library's progress bars that shows none."""

    class Bar(tqdm):
        # Any: the library's arguments.
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)  # type: ignore[no-untyped-call]  # the library's

        def update(self, n: float | None = 1) -> bool | None:
            transfer.note_bytes(int(n or 0), are_stored=True)
            return None

        def update_transfer(self, n: float | None = 1) -> None:
            transfer.note_bytes(int(n or 0), are_stored=False)

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:  # Any: as above
            pass

    return Bar


class _Problems(logging.Filter):
    """Logs the library's warnings as ours, instead of to standard error, and keeps the last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        self.last = " ".join(record.getMessage().split())[:_MAX_REASON]
        logger.info("huggingface_hub: %s", self.last)
        return False

    @contextmanager
    def noted(self) -> Iterator[None]:
        loggers = [logging.getLogger(name) for name in _LIBRARY_LOGGERS]
        for library in loggers:
            library.addFilter(self)
        try:
            yield
        finally:
            for library in loggers:
                library.removeFilter(self)


def continue_download(
    revision: HubRevision,
    file: HubFile,
    settings: HubSettings,
    bar: type[tqdm],
    note_bytes: Callable[[int], None],
) -> None:
    """Complete the partial download of a large file, if any.

    The file is among the blobs of the cache then, where the library finds it. `note_bytes` is
    called with the bytes of the partial file. Raises the library's errors.
    """
    folder = f"models--{revision.id.replace('/', '--')}"
    part = _largest_part(settings.cache / folder / "blobs", file)
    if part is None or file.sha256 is None or settings.is_offline:
        return
    lock = settings.cache / ".locks" / folder / f"{file.sha256}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, timeout=_LOCK_S, mode=0o664):
            _complete(part, revision, file, settings, bar, note_bytes)
    except Timeout:
        # Another program is downloading it.
        return


def _complete(
    part: Path,
    revision: HubRevision,
    file: HubFile,
    settings: HubSettings,
    bar: type[tqdm],
    note_bytes: Callable[[int], None],
) -> None:
    with part.open("ab") as stream:
        num_bytes = stream.tell()
        logger.info("Continuing the download of %s after %s bytes", file.name, num_bytes)
        note_bytes(num_bytes)
        http_get(
            hf_hub_url(
                revision.id, file.name, revision=revision.commit, endpoint=settings.endpoint
            ),
            stream,
            resume_size=num_bytes,
            headers=_headers(),
            expected_size=file.size,
            displayed_filename=file.name,
            tqdm_class=bar,
        )
    with part.open("rb") as stored:
        digest = hashlib.file_digest(stored, "sha256").hexdigest()
    if digest != file.sha256:
        # The library downloads it from its beginning.
        logger.warning(
            "The partial download of %s is damaged; downloading the whole file again", file.name
        )
        part.unlink()
        note_bytes(-(file.size or 0))
        return
    part.chmod(0o664)
    part.replace(part.with_name(digest))


def _headers() -> dict[str, str]:
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    return {} if token is None else {"authorization": f"Bearer {token}"}


def _largest_part(blobs: Path, file: HubFile) -> Path | None:
    """Return the largest part of the file, unless it is complete or too large."""
    if file.sha256 is None or file.size is None:
        return None
    sizes = {part: part.stat().st_size for part in blobs.glob(f"{file.sha256}.*.incomplete")}
    part = max(sizes, key=lambda each: sizes[each], default=None)
    return part if part is not None and 0 < sizes[part] <= file.size else None


class HubUnreachableError(CheckpointError):
    """The Hub does not answer; cached files can be used."""

    def __init__(self, name: HubName, reason: str, advice: str) -> None:
        """`reason` describes the problem, without the name of the model."""
        super().__init__(f"{name} is not a folder, and cannot be downloaded: {reason}; {advice}.")
        self.reason = reason


def hub_error(error: BaseException, name: HubName, settings: HubSettings) -> CheckpointError:
    """Return the error to raise for an exception of the library."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, HfHubHTTPError):
            return _rejection(cause, name, settings.endpoint)
    for cause in causes:
        if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRORS:
            advice = (
                "make it writable" if cause.errno in _ACCESS_ERRORS else "free some space there"
            )
            return CheckpointError(
                f"{name} cannot be stored in {settings.cache}: {cause.strerror}; {advice}, or set "
                "HF_HOME to a folder on another disk."
            )
    # The innermost cause, which describes the connection.
    return HubUnreachableError(
        name, f"{settings.endpoint}: {_reason(causes[-1])}", "check the network and HF_ENDPOINT"
    )


def _rejection(error: HfHubHTTPError, name: HubName, endpoint: str) -> CheckpointError:
    """Return the error for an answer of the Hub."""
    status = error.response.status_code
    access = "set HF_TOKEN to a token of an account that may read it"
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{name} is gated ({status}): accept its terms at {endpoint}/{name.id}, and {access}."
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"{name.id} has no revision {name.revision} on {endpoint} ({status}); after the @, "
            "write a branch, a tag or a commit of it."
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return CheckpointError(
            f"{endpoint} lists a file of {name} that it does not have ({status}); try again, or "
            "use another revision."
        )
    if isinstance(error, DisabledRepoError):
        return CheckpointError(f"Access to {name} is disabled on {endpoint}; use another model.")
    if status == 401 and get_token() is not None:
        return CheckpointError(
            f"{endpoint} denies access to {name} with this token (401); check the name, and "
            f"{access}."
        )
    if isinstance(error, RepositoryNotFoundError) or status in (401, 404):
        return CheckpointError(
            f"{name} is neither a folder nor a model on {endpoint} ({status}); check the name, or "
            f"if it is private, {access}."
        )
    if status == 403:
        return CheckpointError(f"{endpoint} denies access to {name} (403); {access}.")
    if status == 429:
        return HubUnreachableError(
            name,
            f"{endpoint} is limiting the rate of requests (429)",
            "try again in a few minutes, or set HF_TOKEN for a higher limit",
        )
    if status >= 500:
        return HubUnreachableError(name, f"{endpoint} returned status {status}", "try again later")
    return CheckpointError(f"{endpoint} rejected the request for {name} with status {status}.")


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else type(error).__name__
    return text[:_MAX_REASON]


# Any: the arguments of the function.
def _start_call(function: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Run a function in a daemon thread; Python exits without waiting for it, unlike a pool."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pagedray-hub", daemon=True).start()
    return future

"""Finds a model on the Hub, and downloads its files to this node, once for all processes."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pagedray.errors import CheckpointError, PagedRayError
from pagedray.model_config import HubFile, HubRevision
from pagedray.text import pluralize
from workers.hub.model_name import HubName, HubSettings, is_commit, is_side_file

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

__all__ = ["Snapshot", "fetch_files", "fetch_header", "find_revision", "side_files"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")
_NUM_TRIES = 3

_SHA256 = re.compile(r"[0-9a-f]{64}")
_LOCK_POLL_S = 0.2
_LEFTOVER_S = 3600.0
"""A partial file that was not written for so long is of a process that has ended."""


def find_revision(name: HubName, settings: HubSettings | None = None) -> HubRevision:
    """Return the commit of a model and its files.

    The cache answers if it knows the requested commit, if HF_HUB_OFFLINE is set, and if the
    Hub cannot be reached. Raises CheckpointError.
    """
    settings = settings or HubSettings.from_environment()
    if settings.is_offline:
        if cached := _cached(name, settings):
            return cached
        raise _offline_error(str(name), name, settings)
    commit = cached_commit(settings.cache, name.id, name.revision)
    if commit == name.revision and (known := _snapshot(name, commit, settings).read_listing()):
        return known
    # The library is imported only if a model is on the Hub.
    from workers.hub.transfer import HubUnreachableError

    try:
        revision = _answer(_ask_for_model, name, settings)
    except HubUnreachableError as error:
        cached = _cached(name, settings)
        if cached is None:
            raise
        logger.warning(
            "%s; using commit %s of %s from the cache.", error.reason, cached.commit[:12], name.id
        )
        return cached
    _snapshot(name, revision.commit, settings).note_revision(revision, name.revision)
    return revision


def side_files(revision: HubRevision) -> list[str]:
    """Return the names of the files that a model has besides its weights."""
    return [file.name for file in revision.files if is_side_file(file.name)]


def fetch_header(
    revision: HubRevision, file_name: str, settings: HubSettings | None = None
) -> list[tuple[str, str, int]]:
    """Return the name, dtype and number of elements of each tensor in a file on the Hub.

    Only the header of the file is downloaded. Raises CheckpointError.
    """
    settings = settings or HubSettings.from_environment()
    name = HubName(revision.id, revision.commit)
    if settings.is_offline:
        raise _offline_error(f"{file_name} of {name}", name, settings)
    return _answer(partial(_ask_for_header, file_name), name, settings)


def fetch_files(
    revision: HubRevision,
    names: Iterable[str],
    report_progress: Callable[[int, int], None] | None = None,
    settings: HubSettings | None = None,
) -> Path:
    """Return the folder with these files, after downloading the missing files.

    Uses neither network nor lock if the cache has all of them. `report_progress` is called with the
    bytes received, and of all files to download. Raises CheckpointError.
    """
    settings = settings or HubSettings.from_environment(revision.cache)
    snapshot = Snapshot(settings.cache, revision.id, revision.commit)
    wanted = set(names)
    files = [file for file in revision.files if file.name in wanted]
    if not snapshot.missing(files):
        return snapshot.folder
    name = HubName(revision.id, revision.commit)
    if settings.is_offline:
        _check_present(files, name, snapshot, settings)
    report = report_progress or _ignore
    try:
        with snapshot.locked(lambda: report(0, 0)):
            # Another process may have downloaded them meanwhile.
            if missing := snapshot.missing(files):
                _download(snapshot, revision, missing, report, settings)
    except PagedRayError:
        raise
    except Exception as error:
        from workers.hub.transfer import hub_error

        raise hub_error(error, name, settings) from error
    return snapshot.folder


def _download(
    snapshot: Snapshot,
    revision: HubRevision,
    files: list[HubFile],
    report_progress: Callable[[int, int], None],
    settings: HubSettings,
) -> None:
    from workers.hub.transfer import Transfer

    started_s = time.monotonic()
    with snapshot.receiving(files) as verify:
        Transfer(revision, files, settings).run(verify, report_progress)
    logger.info(
        "Downloaded %s of %s at %s: %.2f GB in %.1f s.",
        pluralize(len(files), "file"),
        revision.id,
        revision.commit[:12],
        sum(file.size or 0 for file in files) / 1e9,
        time.monotonic() - started_s,
    )


def _answer(
    ask: Callable[[HubName, HubSettings], Answer], name: HubName, settings: HubSettings
) -> Answer:
    """Return the result of `ask`, which may fail a few times. Raises CheckpointError."""
    from workers.hub.transfer import HubUnreachableError, hub_error

    for num_tries in range(1, _NUM_TRIES + 1):
        try:
            return ask(name, settings)
        except PagedRayError:
            raise
        except Exception as error:
            problem = hub_error(error, name, settings)
            has_answered = hasattr(error, "response")
            may_retry = isinstance(problem, HubUnreachableError) and has_answered
            if num_tries == _NUM_TRIES or not may_retry:
                raise problem from error
        time.sleep(settings.retry_s * num_tries)
    raise AssertionError


def _ask_for_header(
    file_name: str, name: HubName, settings: HubSettings
) -> list[tuple[str, str, int]]:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint, library_name="pagedray")
    header = api.parse_safetensors_file_metadata(
        name.id, file_name, revision=name.revision, timeout=settings.answer_timeout_s
    )
    return [
        (tensor, entry.dtype, entry.parameter_count) for tensor, entry in header.tensors.items()
    ]


def _ask_for_model(name: HubName, settings: HubSettings) -> HubRevision:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint, library_name="pagedray")
    info = api.model_info(
        name.id, revision=name.revision, files_metadata=True, timeout=settings.answer_timeout_s
    )
    if info.sha is None or not is_commit(info.sha) or info.siblings is None:
        raise CheckpointError(
            f"{settings.endpoint} describes {name} without its commit and files; check HF_ENDPOINT."
        )
    files = [
        HubFile(
            name=sibling.rfilename,
            size=sibling.size,
            sha256=None if sibling.lfs is None else sibling.lfs.sha256,
        )
        for sibling in info.siblings
    ]
    return HubRevision(id=name.id, commit=info.sha, files=tuple(files))


def _cached(name: HubName, settings: HubSettings) -> HubRevision | None:
    """Return the revision as the cache knows it."""
    commit = cached_commit(settings.cache, name.id, name.revision)
    if commit is None:
        return None
    snapshot = _snapshot(name, commit, settings)
    return snapshot.read_listing() or snapshot.present_files()


def _snapshot(name: HubName, commit: str, settings: HubSettings) -> Snapshot:
    return Snapshot(settings.cache, name.id, commit)


def _check_present(
    files: Iterable[HubFile], name: HubName, snapshot: Snapshot, settings: HubSettings
) -> None:
    """Raise CheckpointError unless the cache has all these files."""
    for file in files:
        if not snapshot.has_file(file):
            raise _offline_error(f"{file.name} of {name}", name, settings)


def _offline_error(what: str, name: HubName, settings: HubSettings) -> CheckpointError:
    return CheckpointError(
        f"{what} is not in the cache {settings.cache}, and HF_HUB_OFFLINE forbids its download; "
        f"unset it, or run `hf download {name.id}` where there is a network."
    )


def _ignore(done: int, total: int) -> None:
    pass


def cached_commit(cache: Path, model_id: str, revision: str) -> str | None:
    """Return the commit that a revision was when it was last resolved."""
    if is_commit(revision):
        return revision
    try:
        commit = (_root(cache, model_id) / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    return commit if is_commit(commit) else None


class Snapshot:
    """The files of one commit of a model."""

    def __init__(self, cache: Path, model_id: str, commit: str) -> None:
        self._root = _root(cache, model_id)
        self._id = model_id
        self._commit = commit
        self._notes = self._root / "pagedray"
        self.folder = self._root / "snapshots" / commit
        """The folder of the files, which are links to the blobs of the model."""

    def read_listing(self) -> HubRevision | None:
        """Return all files of the commit, or None if nothing in the cache lists them."""
        files = self._own_listing() or self._library_listing()
        return None if files is None else self._with_files(files)

    def present_files(self) -> HubRevision | None:
        """Return the files that are there, or None if no model can be among them.

        They may not be all of the commit: programs that download file by file leave no list.
        """
        names = (path for path in self.folder.rglob("*") if path.is_file())
        files = [
            HubFile(name=str(path.relative_to(self.folder)), size=path.stat().st_size)
            for path in sorted(names)
        ]
        are_weights = any(file.name.endswith(".safetensors") for file in files)
        return self._with_files(files) if are_weights else None

    def note_revision(self, revision: HubRevision, name: str) -> None:
        """Remember the files of the commit, and that a branch or tag is at it.

        A cache that cannot be written, such as a shared cache, is left as it is.
        """
        listing = {"files": [asdict(file) for file in revision.files]}
        with suppress(OSError):
            _write(self._listing, json.dumps(listing))
            if name != self._commit:
                _write(self._root / "refs" / name, self._commit)

    def missing(self, files: Iterable[HubFile]) -> list[HubFile]:
        """Return the files that are not there, have another size, or were not verified."""
        unverified = self._unverified()
        return [file for file in files if file.name in unverified or not self.has_file(file)]

    def has_file(self, file: HubFile) -> bool:
        """Return whether a file is there and has its size."""
        try:
            size = (self.folder / file.name).stat().st_size
        except OSError:
            return False
        return file.size is None or size == file.size

    @contextmanager
    def locked(self, note_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of the model on this node, so that one process downloads it.

        `note_wait` is called several times a second while another process has it. Raises OSError
        if the cache cannot be written.
        """
        self._notes.mkdir(parents=True, exist_ok=True)
        with (self._notes / "lock").open("a") as file:
            is_waiting = False
            while not _is_locked(file.fileno()):
                if not is_waiting:
                    logger.info("Waiting for another process that downloads %s.", self._id)
                is_waiting = True
                note_wait()
                time.sleep(_LOCK_POLL_S)
            yield

    @contextmanager
    def receiving(self, files: Sequence[HubFile]) -> Iterator[Callable[[HubFile], None]]:
        """Prepare the download of files; yield the function that verifies each.

        A file counts as missing until all are verified. Raises CheckpointError if they do not fit
        on the disk.
        """
        self._check_space(files)
        self._remove_leftovers({file.sha256 for file in files})
        names = self._unverified() | {file.name for file in files}
        _write(self._journal, json.dumps(sorted(names)))
        for file in files:
            if not self.has_file(file):
                self._remove(file)
        yield self._verify
        self._journal.unlink(missing_ok=True)

    @property
    def _listing(self) -> Path:
        return self._notes / f"{self._commit}.json"

    @property
    def _journal(self) -> Path:
        return self._notes / f"{self._commit}.unverified"

    def _with_files(self, files: Sequence[HubFile]) -> HubRevision:
        return HubRevision(id=self._id, commit=self._commit, files=tuple(files))

    def _own_listing(self) -> list[HubFile] | None:
        try:
            # Any: parsed JSON.
            listing: Any = json.loads(self._listing.read_bytes())
            return [HubFile(**file) for file in listing["files"]]
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def _library_listing(self) -> list[HubFile] | None:
        """Return the list that `hf download` leaves."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            tree = get_cached_repo_tree(
                self._id, revision=self._commit, cache_dir=self._root.parent
            )
        except CachedRepoTreeNotFoundError:
            return None
        return [HubFile(name=file.path, size=file.size) for file in tree]

    def _unverified(self) -> set[str]:
        try:
            return set(json.loads(self._journal.read_bytes()))
        except (OSError, ValueError, TypeError):
            return set()

    def _check_space(self, files: Sequence[HubFile]) -> None:
        needed = sum(file.size or 0 for file in files if not self.has_file(file))
        free = shutil.disk_usage(self._notes).free
        if needed > free:
            raise CheckpointError(
                f"{self._id} needs {needed / 1e9:.2f} GB more in {self._root.parent}, which has "
                f"only {free / 1e9:.2f} GB free; free some space there, or set HF_HOME to a folder "
                "on another disk."
            )

    def _remove_leftovers(self, wanted: Collection[str | None]) -> None:
        """Remove leftovers of killed processes, except of files with the wanted digests."""
        for path in (self._root / "blobs").glob("*.incomplete"):
            if path.name.partition(".")[0] in wanted:
                continue
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LEFTOVER_S:
                    path.unlink()

    def _remove(self, file: HubFile) -> None:
        link = self.folder / file.name
        blob = link.resolve()
        link.unlink(missing_ok=True)
        if blob.is_relative_to(self._root.resolve()):
            blob.unlink(missing_ok=True)

    def _verify(self, file: HubFile) -> None:
        """Raise CheckpointError, and remove the file, if the file differs from the Hub's."""
        path = self.folder / file.name
        # The library names the blobs of large files by their digest.
        blob = path.resolve().name
        expected = file.sha256 or (blob if _SHA256.fullmatch(blob) else None)
        is_whole = self.has_file(file)
        if is_whole and expected is not None:
            with path.open("rb") as stored:
                is_whole = hashlib.file_digest(stored, "sha256").hexdigest() == expected
        if not is_whole:
            self._remove(file)
            raise CheckpointError(
                f"{self._id}: {file.name} was damaged during its download and is removed; start "
                "again to download it once more."
            )


def _root(cache: Path, model_id: str) -> Path:
    return cache / f"models--{model_id.replace('/', '--')}"


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # A file system without locks; the library writes every download to a file of its own.
        return True
    return True


def _write(path: Path, text: str) -> None:
    """Write a file at once, so that readers see the old or the new file, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    # Others may share the cache.
    Path(temporary).chmod(0o664)
    Path(temporary).replace(path)

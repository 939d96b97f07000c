"""Finds a model on the Hub, and downloads its files to this node, once for all processes."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pagedray.errors import CheckpointError, PagedRayError
from pagedray.model_config import HubFile, HubRevision
from pagedray.text import pluralize
from workers.hub.daemon_calls import start_call
from workers.hub.model_name import HubName, is_commit
from workers.hub.needed_files import is_side_file
from workers.hub.settings import HubSettings
from workers.hub.snapshot import Snapshot, cached_commit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

__all__ = ["fetch_files", "fetch_header", "find_revision", "side_files"]

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_NUM_TRIES = 3


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
    from workers.hub.problems import HubUnreachableError

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
        from workers.hub.problems import hub_error

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
    """Return the result of `ask`, which may fail a few times.

    Raises CheckpointError.
    """
    from workers.hub.problems import HubUnreachableError, hub_error

    for num_tries in range(1, _NUM_TRIES + 1):
        try:
            return _timely_answer(ask, name, settings)
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


def _timely_answer(
    ask: Callable[[HubName, HubSettings], Answer], name: HubName, settings: HubSettings
) -> Answer:
    """Return the result of `ask`.

    Raises TimeoutError if the Hub answers too slowly.
    """
    asking = start_call(ask, name, settings)
    try:
        return asking.result(settings.answer_timeout_s)
    except TimeoutError:
        if asking.done():
            raise
    raise TimeoutError(f"no response within {settings.answer_timeout_s:g} s")


def _ask_for_header(
    file_name: str, name: HubName, settings: HubSettings
) -> list[tuple[str, str, int]]:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint, library_name="pagedray")
    header = api.parse_safetensors_file_metadata(
        name.id, file_name, revision=name.revision, timeout=settings.answer_timeout_s / 2
    )
    return [
        (tensor, entry.dtype, entry.parameter_count) for tensor, entry in header.tensors.items()
    ]


def _ask_for_model(name: HubName, settings: HubSettings) -> HubRevision:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=settings.endpoint, library_name="pagedray")
    info = api.model_info(
        name.id, revision=name.revision, files_metadata=True, timeout=settings.answer_timeout_s / 2
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

"""Continues the download of a file that a killed process began.

huggingface_hub writes each download to a file of its own, and continues none. What was received is
only used if the whole file then has the digest that the Hub states.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout
from huggingface_hub import constants, get_token, hf_hub_url
from huggingface_hub.file_download import http_get

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from huggingface_hub.utils.tqdm import tqdm

    from pagedray.model_config import HubFile, HubRevision
    from workers.hub.settings import HubSettings

__all__ = ["continue_download"]

logger = logging.getLogger(__name__)

_LOCK_S = 0.1


def continue_download(
    revision: HubRevision,
    file: HubFile,
    settings: HubSettings,
    bar: type[tqdm],
    note_bytes: Callable[[int], None],
) -> None:
    """Complete what is left of the download of a large file, if anything is.

    The file is among the blobs of the cache then, where the library finds it. `note_bytes` is
    called with the bytes that were there. Raises what the library does.
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
                revision.id,
                file.name,
                revision=revision.commit,
                endpoint=settings.endpoint,
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
    """Return the file with most of what was received, unless it is all or too much of it."""
    if file.sha256 is None or file.size is None:
        return None
    sizes = {part: part.stat().st_size for part in blobs.glob(f"{file.sha256}.*.incomplete")}
    part = max(sizes, key=lambda each: sizes[each], default=None)
    return part if part is not None and 0 < sizes[part] <= file.size else None

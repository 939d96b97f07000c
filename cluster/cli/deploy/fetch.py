"""`pagedray deploy fetch`: downloads a model from the Hub or S3, or waits until it is there.

A Job of the Helm chart downloads into a volume, and each pod waits until it can be read. An
interrupted download is continued, and files count as missing until they are verified.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError, StartupError
from workers.hub.fetch import fetch_files, find_revision, side_files
from workers.hub.model_name import HubName, parse_model
from workers.s3.location import S3_SCHEME, parse_location
from workers.s3.mirror import Mirror
from workers.weights.local_weights import listed_weight_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from workers.hub.settings import HubSettings

__all__ = ["fetch", "fetch_command", "fetch_from_s3", "wait_for_mirror", "wait_for_model"]

logger = logging.getLogger(__name__)

_POLL_S = 5.0


def fetch_command(model: str, *, folder: Path | None, is_waiting: bool) -> int:
    """Print the folder of a model after its download, or when another process is done with it.

    Raises PagedRayError.
    """
    from cluster.serving.telemetry.log_lines import logging_to
    from workers.hub.settings import HubSettings

    is_in_s3 = model.startswith(S3_SCHEME)
    if is_in_s3 and folder is None:
        raise StartupError("A model on S3 requires --folder, the folder to download it to.")
    if not is_in_s3 and folder is not None:
        raise StartupError(
            "--folder is for models on S3; HF_HOME sets the folder of models from the Hub."
        )
    with logging_to(form="text", level="info"):
        if folder is not None:
            # A name that is wrong would be waited for without end.
            parse_location(model)
            found = wait_for_mirror(folder) if is_waiting else fetch_from_s3(model, folder)
        else:
            run = wait_for_model if is_waiting else fetch
            found = run(model, HubSettings.from_environment())
        print(found)
    return 0


def fetch(model: str, settings: HubSettings) -> Path:
    """Return the folder of a complete model.

    Raises CheckpointError.
    """
    return _fetch(_hub_name(model), settings)


def fetch_from_s3(model: str, folder: Path) -> Path:
    """Return the folder after downloading a model of S3 into it. Raises CheckpointError."""
    location = parse_location(model)
    try:
        # An optional dependency.
        from workers.s3.bucket import Bucket
        from workers.s3.fetch import fetch_folder
    except ImportError as error:
        raise CheckpointError(
            "Downloads from S3 require the package obstore: pip install 'pagedray[s3]'."
        ) from error
    return fetch_folder(location, folder, Bucket(location))


def wait_for_model(model: str, settings: HubSettings, poll_s: float = _POLL_S) -> Path:
    """Return the folder of a model as soon as another process has downloaded all of it.

    Raises CheckpointError if it is not the name of a model on the Hub.
    """
    name = _hub_name(model)
    offline = replace(settings, is_offline=True)

    def look() -> Path | str:
        try:
            return _fetch(name, offline)
        except CheckpointError as error:
            return str(error)

    return _wait(look, poll_s)


def wait_for_mirror(folder: Path, poll_s: float = _POLL_S) -> Path:
    """Return the folder as soon as another process has downloaded a model of S3 into it."""

    def look() -> Path | str:
        problem = Mirror(folder).problem()
        return folder if problem is None else problem

    return _wait(look, poll_s)


def _wait(look: Callable[[], Path | str], poll_s: float) -> Path:
    """Return the folder that `look` finds; until then, `look` returns the missing part."""
    last = ""
    while True:
        found = look()
        if not isinstance(found, str):
            return found
        # Once for each reason, not for each look.
        if found != last:
            logger.info("Waiting: %s", found)
        last = found
        time.sleep(poll_s)


def _hub_name(model: str) -> HubName:
    name = parse_model(model)
    if not isinstance(name, HubName):
        raise CheckpointError(f"{model!r:.200} is a folder; only models on the Hub are downloaded.")
    return name


def _fetch(name: HubName, settings: HubSettings) -> Path:
    hub = find_revision(name, settings)
    folder = fetch_files(hub, side_files(hub), settings=settings)
    fetch_files(hub, listed_weight_files(hub, folder), settings=settings)
    return folder

"""`pagedray deploy fetch`: downloads a model into the cache of the Hub, or waits for that.

A Job of the Helm chart downloads into a volume, and each pod waits until it can be read. What a
process left half-way is continued, and files count as missing until they are verified.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from workers.hub.fetch import fetch_files, find_revision, side_files
from workers.hub.model_name import HubName, parse_model
from workers.weights.local_weights import listed_weight_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from workers.hub.settings import HubSettings

__all__ = ["fetch", "wait_for_model"]

logger = logging.getLogger(__name__)

_POLL_S = 5.0


def fetch(
    model: str,
    settings: HubSettings,
    report_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the folder of a model whose files are all there. Raises CheckpointError."""
    name = parse_model(model)
    if not isinstance(name, HubName):
        raise CheckpointError(f"{model!r:.200} is a folder; only models on the Hub are downloaded.")
    hub = find_revision(name, settings)
    folder = fetch_files(hub, side_files(hub), None, settings)
    fetch_files(hub, listed_weight_files(hub, folder), report_progress, settings)
    return folder


def wait_for_model(model: str, settings: HubSettings, poll_s: float = _POLL_S) -> Path:
    """Return the folder of a model as soon as another process has downloaded all of it."""
    offline = replace(settings, is_offline=True)
    last = ""
    while True:
        try:
            return fetch(model, offline)
        except CheckpointError as error:
            # Once for each reason, not for each look.
            if str(error) != last:
                logger.info("Waiting: %s", error)
            last = str(error)
        time.sleep(poll_s)

"""Locates the files of MODEL on this node, downloads them from the Hub, and lists its weights."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from pagedray.files import has_file
from pagedray.model_config import Dtype, HubRevision
from workers.hub.fetch import fetch_files, fetch_header, find_revision, side_files
from workers.hub.model_name import HubName, HubSettings, is_gguf, parse_model
from workers.weights.tensor_entries import GGUF_SHARD, common_dtype, folder_dtype, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagedray.config import EngineConfig

__all__ = [
    "DownloadLine",
    "LocatedModel",
    "check_weights_listed",
    "gguf_file",
    "gguf_shards",
    "hub_dtype",
    "listed_weight_files",
    "locate_model",
    "pin_model",
    "with_local_weights",
    "with_revision",
]

logger = logging.getLogger(__name__)

_WINDOW_S = 5.0
_SHORTEST_S = 0.5


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """Where the files of a model are, except for its weights if it is on the Hub."""

    folder: Path
    hub: HubRevision | None = None
    gguf: str | None = None
    """As in `ModelConfig`."""


def locate_model(
    model: str | Path,
    report_progress: Callable[[str, float], None] | None = None,
    settings: HubSettings | None = None,
    *,
    cache: Path | None = None,
) -> LocatedModel:
    """Return the model that a name stands for, and download all but its weights.

    The name is that of a folder or a GGUF file, or a Hub id. A GGUF file on the Hub is downloaded
    as a whole, because it contains the configuration.
    `report_progress` is called with a description of the download, and the finished part. `cache`
    replaces the cache of the environment, on every node. Raises CheckpointError.
    """
    name = parse_model(model)
    if not isinstance(name, HubName):
        if not is_gguf(name):
            return LocatedModel(name)
        path = name.expanduser().absolute()
        return LocatedModel(_gguf_folder(path), gguf=str(path))
    if cache is not None:
        settings = HubSettings.from_environment(cache)
    hub = replace(find_revision(name, settings), cache=cache)
    gguf = gguf_file(hub, name.quant)
    files = side_files(hub) if gguf is None else gguf_shards(hub, gguf)
    if gguf is None and "config.json" not in files:
        raise CheckpointError(
            f"{name} has no config.json; a model must be a checkpoint in the format of "
            "transformers."
        )

    line = DownloadLine(hub.id)

    def report(done: int, total: int) -> None:
        if report_progress is not None:
            report_progress(line.text(done), done / max(total, 1))

    folder = fetch_files(hub, files, report, settings)
    return LocatedModel(folder if gguf is None else _gguf_folder(folder / gguf), hub, gguf)


def gguf_file(hub: HubRevision, quant: str | None) -> str | None:
    """Return the GGUF file of a repository, the first if it is split, or None for another format.

    Raises CheckpointError if `quant` is a part of the names of no file or of several files.
    """
    names = [file.name for file in hub.files if file.name.endswith(".gguf")]
    names = [
        name for name in names if (match := GGUF_SHARD.search(name)) is None or int(match[2]) == 1
    ]
    if quant is None:
        if not names or any(file.name == "config.json" for file in hub.files):
            return None
        found = names
    else:
        pattern = re.compile(rf"(?<![a-zA-Z0-9]){re.escape(quant)}(?![a-zA-Z0-9])", re.IGNORECASE)
        found = [name for name in names if pattern.search(name)]
    if len(found) != 1:
        choices = ", ".join(sorted(found or names)[:20]) or "none"
        raise CheckpointError(
            f"{hub.id} needs the name of one GGUF file, or a part of it, after a colon, such as "
            f"{hub.id}:Q4_K_M; its files are {choices}."
        )
    return found[0]


def gguf_shards(hub: HubRevision, first: str) -> list[str]:
    """Return the names of all files of a model, of which `first` is the first."""
    match = GGUF_SHARD.search(first)
    if match is None:
        return [first]
    return sorted(
        file.name
        for file in hub.files
        if (other := GGUF_SHARD.search(file.name)) and (other[1], other[3]) == (match[1], match[3])
    )


def _gguf_folder(path: Path) -> Path:
    # Importing its libraries, with torch, takes seconds.
    from workers.hub.gguf_folder import gguf_folder

    return gguf_folder(path)


def with_revision(model: str | Path, revision: str | None) -> str | Path:
    """Return the name of a model with its revision, unless it is a folder.

    Raises CheckpointError if the name has another revision.
    """
    if revision is None:
        return model
    try:
        name = parse_model(model)
    except CheckpointError:
        # It may be a folder on other nodes.
        return model
    if not isinstance(name, HubName):
        logger.info("revision %s has no effect: %s is a path.", revision, model)
        return model
    if "@" in str(model) and name.revision != revision:
        raise CheckpointError(f"{model} names another revision than revision {revision}; use one.")
    return f"{str(model).partition('@')[0]}@{revision}"


def pin_model(model: str) -> str:
    """Return the name of a model on the Hub with its commit, so that it is the same everywhere.

    Any other name is returned as it is: it may be a folder on other nodes. Raises CheckpointError.
    """
    try:
        name = parse_model(model)
    except CheckpointError:
        return model
    if not isinstance(name, HubName):
        return model
    return f"{str(model).partition('@')[0]}@{find_revision(name).commit}"


class DownloadLine:
    """The name of a model, and the bytes per second over the last seconds."""

    def __init__(self, model_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._model_id = model_id
        self._clock = clock
        self._received: deque[tuple[float, int]] = deque()
        """Pairs of a time and the number of bytes that had been received then."""

    def text(self, num_bytes: int) -> str:
        """Return the text once this many bytes have been received; the speed follows `; `."""
        now_s = self._clock()
        self._received.append((now_s, num_bytes))
        while now_s - self._received[0][0] > _WINDOW_S:
            self._received.popleft()
        began_s, first = self._received[0]
        what = f"Downloading {self._model_id}"
        if now_s - began_s < _SHORTEST_S or num_bytes <= first:
            return what
        return f"{what}; {(num_bytes - first) / (now_s - began_s) / 1e6:.1f} MB/s"


def with_local_weights(
    config: EngineConfig, report_progress: Callable[[int, int], None]
) -> EngineConfig:
    """Return the configuration with the folder of the model on this node, weights included.

    `report_progress` is called with the bytes downloaded, and of all. Raises CheckpointError.
    """
    hub, gguf = config.model.hub, config.model.gguf
    if config.load_format == "dummy" or (hub is None and gguf is None):
        return config
    if gguf is not None:
        path = Path(gguf)
        if hub is not None:
            path = fetch_files(hub, gguf_shards(hub, gguf), report_progress) / gguf
        return replace(config, model=replace(config.model, folder=_gguf_folder(path)))
    assert hub is not None
    folder = fetch_files(hub, side_files(hub), report_progress)
    fetch_files(hub, listed_weight_files(hub, folder), report_progress)
    return replace(config, model=replace(config.model, folder=folder))


def check_weights_listed(hub: HubRevision, folder: Path) -> None:
    """Raise CheckpointError unless the repository has weights that can be loaded.

    `folder` has the other files.
    """
    listed_weight_files(hub, folder)


def hub_dtype(hub: HubRevision, folder: Path, settings: HubSettings | None = None) -> Dtype | None:
    """Return the common dtype of the first file of weights, of which only the header is read.

    `folder` has the other files. Raises CheckpointError.
    """
    first = listed_weight_files(hub, folder)[0]
    if has_file(folder / first):
        return folder_dtype(folder)
    return common_dtype(fetch_header(hub, first, settings))


def listed_weight_files(hub: HubRevision, folder: Path) -> list[str]:
    """Return the names of the weight files; `folder` has all other files.

    Raises CheckpointError if the repository lacks a file.
    """
    names = {file.name for file in hub.files}
    wanted = weight_files(folder, names)
    if not wanted:
        raise CheckpointError(
            f"{hub.id} has no model.safetensors and no model.safetensors.index.json; weights in "
            "other formats are not supported, and pickled ones (*.bin) are never loaded."
        )
    for name in wanted:
        if name not in names:
            raise CheckpointError(
                f"{hub.id} has no {name!r:.200}, which its model.safetensors.index.json lists; use "
                "another revision."
            )
    return wanted

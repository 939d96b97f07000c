"""The weights of a model on the Hub: their files, their dtype, and their copy on a node."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from pagedray.files import has_file
from workers.hub.fetch import fetch_files, fetch_header, side_files
from workers.weights.tensor_entries import common_dtype, folder_dtype, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagedray.config import EngineConfig
    from pagedray.model_config import Dtype, HubRevision
    from workers.hub.model_name import HubSettings

__all__ = ["check_weights_listed", "hub_dtype", "listed_weight_files", "with_local_weights"]


def with_local_weights(
    config: EngineConfig, report_progress: Callable[[int, int], None]
) -> EngineConfig:
    """Return the configuration with the folder of the model on this node, weights included.

    `report_progress` is called with the bytes downloaded, and of all. Raises CheckpointError.
    """
    hub = config.model.hub
    if hub is None or config.load_format == "dummy":
        return config
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

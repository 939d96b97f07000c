"""How large the weights of a model are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedray.errors import CheckpointError
from workers.hub.fetch import find_revision
from workers.hub.model_name import HubName, parse_model

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder_weight_bytes", "hub_weight_bytes"]

_SUFFIX = ".safetensors"


def folder_weight_bytes(folder: Path) -> int:
    """Return the size of the files with weights in a folder. Raises CheckpointError."""
    sizes = [path.stat().st_size for path in folder.glob(f"*{_SUFFIX}")]
    if not sizes:
        raise CheckpointError(f"{folder} has no file of weights (*{_SUFFIX}).")
    return sum(sizes)


def hub_weight_bytes(model: str) -> int:
    """Return the size of the files with weights of a model on the Hub. Raises CheckpointError."""
    name = parse_model(model)
    if not isinstance(name, HubName):
        raise CheckpointError(f"{model} is a folder here; use --checkpoint to name it.")
    files = find_revision(name).files
    is_weight = [file for file in files if "/" not in file.name and file.name.endswith(_SUFFIX)]
    return sum(file.size or 0 for file in is_weight)

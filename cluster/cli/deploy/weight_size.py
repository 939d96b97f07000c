"""How large the weights of a model are."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pagedray.errors import CheckpointError
from workers.hub.fetch import find_revision
from workers.hub.model_name import HubName, parse_model
from workers.s3.location import parse_location

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder_weight_bytes", "hub_weight_bytes", "s3_weight_bytes"]

_SUFFIX = ".safetensors"
_INDEX = "model.safetensors.index.json"


def folder_weight_bytes(folder: Path) -> int:
    """Return the size of the weights of a checkpoint, which may be an index alone.

    Raises CheckpointError.
    """
    sizes = [path.stat().st_size for path in folder.glob(f"*{_SUFFIX}")]
    listed = _listed_bytes(folder / _INDEX)
    if not sizes and not listed:
        raise CheckpointError(
            f"{folder} has no file of weights (*{_SUFFIX}), and no {_INDEX} with their total size."
        )
    # A copy that is not complete has fewer bytes than the index lists.
    return max(sum(sizes), listed)


def hub_weight_bytes(model: str) -> int:
    """Return the size of the files with weights of a model on the Hub. Raises CheckpointError."""
    name = parse_model(model)
    if not isinstance(name, HubName):
        raise CheckpointError(f"{model} is a folder here; use --checkpoint to name it.")
    files = find_revision(name).files
    weights = [file for file in files if "/" not in file.name and _is_weight(file.name)]
    return sum(file.size or 0 for file in weights)


def s3_weight_bytes(model: str) -> int:
    """Return the size of the files with weights of a model in S3. Raises CheckpointError."""
    location = parse_location(model)
    try:
        # An optional dependency.
        from workers.s3.bucket import Bucket
    except ImportError as error:
        raise CheckpointError("the package obstore is not installed (pagedray[s3])") from error
    files = Bucket(location, retry_s=0.1).list_files()
    return sum(file.size for file in files if "/" not in file.name and _is_weight(file.name))


def _listed_bytes(index: Path) -> int:
    """Return the total size that an index states, or 0."""
    try:
        # Any: parsed JSON.
        parsed: Any = json.loads(index.read_bytes())
        return int(parsed["metadata"]["total_size"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0


def _is_weight(name: str) -> bool:
    return name.endswith(_SUFFIX)

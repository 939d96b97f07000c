"""Sampling parameters that a checkpoint recommends in generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from pagedray.presence import has_file
from pagedray.sampling_params import SamplingParams
from workers.models.config_json.config_file import ConfigFile

__all__ = ["sampling_defaults"]

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NONE = ("none", "vllm")


def sampling_defaults(given: str | Path, model_folder: Path) -> tuple[tuple[str, float], ...]:
    """Return the names and values of parameters of requests that do not set them.

    `given` is `auto`, the model's own file if there is one; `none` or `vllm`; or another folder.
    Raises StartupError.
    """
    if str(given) in _NONE:
        return ()
    is_auto = str(given) == "auto"
    path = (model_folder if is_auto else Path(given)) / _FILE
    if not has_file(path):
        if is_auto:
            return ()
        raise StartupError(
            f"generation_config must be auto, none or a folder with {_FILE}, not {given}."
        )
    found = _values(ConfigFile.read(path))
    return tuple(found.items())


def _values(file: ConfigFile) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _NAMES:
        value = file.value(name)
        if value is None:
            continue
        given: dict[str, Any] = {name: value}  # Any: fields of all types
        try:
            SamplingParams(**given)
        except InvalidRequestError as error:
            raise CheckpointError(f"{file.path}: {error}") from error
        assert isinstance(value, int | float)
        found[name] = value
    return found

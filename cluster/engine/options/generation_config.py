"""Sampling parameters that a checkpoint recommends in generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedray.errors import CheckpointError, InvalidRequestError, StartupError
from pagedray.files import has_file
from pagedray.sampling_params import SamplingParams
from workers.models.config_json.config_file import ConfigFile

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["sampling_defaults"]

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_NONE = ("none", "vllm")


def sampling_defaults(
    given: str | Path, model_folder: Path, overrides: Mapping[str, object] | None = None
) -> tuple[tuple[str, float], ...]:
    """Return the names and values of parameters of requests that do not set them.

    `given` is `auto`, the model's own file if there is one; `none` or `vllm`; or another folder.
    `overrides` take precedence; a value of None removes a parameter. Raises StartupError.
    """
    for name in overrides or ():
        if name not in _NAMES:
            raise StartupError(
                f"override_generation_config.{name:.80} is not supported: the defaults of requests "
                f"are {', '.join(_NAMES)}; requests set other parameters themselves."
            )
    path = _path(given, model_folder)
    file = {} if path is None else _values(ConfigFile.read(path))
    changed = ConfigFile(Path("override_generation_config"), {**file, **(overrides or {})})
    return tuple(_values(changed).items())


def _path(given: str | Path, model_folder: Path) -> Path | None:
    """Return the file of the defaults, if any.

    Raises StartupError.
    """
    if str(given) in _NONE:
        return None
    is_auto = str(given) == "auto"
    path = (model_folder if is_auto else Path(given)) / _FILE
    if has_file(path):
        return path
    if is_auto:
        return None
    raise StartupError(
        f"generation_config must be auto, none or a folder with {_FILE}, not {given}."
    )


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

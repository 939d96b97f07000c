"""`--config FILE`: flags of a command in YAML; flags of the command line override them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from cluster.cli.flag import MergedObject
from cluster.cli.parser import MODEL_FLAG, operands
from cluster.cli.serve_flags import CONFIG_FLAG
from pagedray.errors import StartupError
from pagedray.text import nearest_name, quote_json

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

__all__ = ["apply_config"]

_MODEL = "model"
_MAX_BYTES = 2**20


class _Written(str):
    """A number or date as it is written, unlike a quoted text."""

    __slots__ = ()


# Flags are text. As YAML reads numbers, the name 1.10 would be 1.1, and the key 012345670 another.
class _FlagLoader(yaml.SafeLoader):
    """Reads numbers and dates as they are written."""

    def construct_written(self, node: yaml.ScalarNode) -> str:
        return _Written(node.value)


for _kind in ("int", "float", "timestamp"):
    _FlagLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", _FlagLoader.construct_written)


def apply_config(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Make the flags in the file that `arguments` name the defaults of a command's parser.

    Keys are flags without their dashes, `_` being the same as `-`, and `model`. Values are checked
    as on the command line. Returns the arguments to parse. Raises StartupError.
    """
    path = _config_path(arguments)
    if path is None:
        return list(arguments)
    given = _read(path)
    model = given.pop(_MODEL, None)
    if model is not None and not isinstance(model, str):
        raise StartupError(f"{path}: model must be a folder or a Hub id, not {quote_json(model)}.")
    options = parser._option_string_actions
    words: list[str] = []
    for key, value in given.items():
        words += _words(key, value, options, path)
    # Parsed alone, so that each value is checked and converted.
    parsed = vars(parser.parse_args([model or _MODEL, *words]))
    flags = [word.partition("=")[0].partition(".")[0] for word in words if word.startswith("--")]
    named = {options[flag].dest for flag in flags}
    parser.set_defaults(**{name: parsed[name] for name in named if name in parsed})
    if model is None or _names_model(arguments, options):
        return list(arguments)
    return [model, *arguments]


def _config_path(arguments: Sequence[str]) -> Path | None:
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{CONFIG_FLAG}="):
            return Path(argument.partition("=")[2])
        if argument == CONFIG_FLAG and index + 1 < len(arguments):
            return Path(arguments[index + 1])
    return None


def _names_model(arguments: Sequence[str], options: Mapping[str, argparse.Action]) -> bool:
    return bool(operands(arguments, options)) or any(
        one.partition("=")[0] == MODEL_FLAG for one in arguments
    )


def _read(path: Path) -> dict[str, object]:
    """Return the values of a file, by the names of flags."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
        if len(text) > _MAX_BYTES:
            raise StartupError(f"--config {path} is larger than 1 MiB.")
        node = yaml.compose(text, Loader=_FlagLoader)
        found = yaml.load(text, Loader=_FlagLoader)
    except OSError as error:
        raise StartupError(f"Cannot read --config {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"--config {path} is not valid YAML: {_reason(error)}.") from error
    if found is None:
        return {}
    if not isinstance(found, dict) or not isinstance(node, yaml.MappingNode):
        raise StartupError(f"--config {path} must have lines such as `max-model-len: 32K`.")
    # YAML would take the last of equal keys.
    keys = [str(key.value).replace("_", "-") for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:
            raise StartupError(f"--config {path} has {key} twice.")
    return {str(key).replace("_", "-"): value for key, value in found.items()}


def _reason(error: Exception) -> str:
    """Return the place and description of an error in YAML, on one line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).replace('in "<byte string>", ', "at ").split())[:200]
    place, problem = error.problem_mark, error.problem or ""
    if problem.startswith("but "):
        problem = f"{error.context}, {problem}"
    return f"line {place.line + 1}, column {place.column + 1}: {problem:.200}"


def _words(
    key: str, value: object, options: Mapping[str, argparse.Action], path: Path
) -> list[str]:
    """Return a key and its value as on the command line."""
    flag = f"--{key}"
    # Such as `structured-outputs-config.backend`.
    action = options.get(flag.partition(".")[0])
    if flag in (CONFIG_FLAG, "--help"):
        raise StartupError(f"{path}: {key} is only allowed on the command line.")
    if action is None:
        names = [name[2:] for name in options if name.startswith("--")]
        nearest = nearest_name(key, [*names, _MODEL])
        hint = "." if nearest is None else f"; did you mean {nearest}?"
        raise StartupError(f"{path}: {key:.80} is not a flag of pagedray serve{hint}")
    if value is None:
        return []
    if action.nargs == 0:
        return _switch(key, value, options, path)
    if isinstance(value, dict) and (isinstance(action, MergedObject) or action.nargs == "?"):
        return [f"{flag}={json.dumps(_plain(value))}"]
    if action.nargs == "?" and isinstance(value, bool):
        return [f"{flag}={value}"]
    values: list[str] = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str):
            what = "a list of values" if isinstance(value, list) else "a value"
            raise StartupError(f"{path}: {key} must be {what}, not {quote_json(one)}.")
        values.append(one)
    return [flag, *values] if action.nargs == "+" else [f"{flag}={','.join(values)}"]


def _plain(value: object) -> object:
    """Return the value of a field of a JSON object, in which numbers are not texts."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return yaml.safe_load(value) if isinstance(value, _Written) else value


def _switch(
    key: str, value: object, options: Mapping[str, argparse.Action], path: Path
) -> list[str]:
    if not isinstance(value, bool):
        raise StartupError(f"{path}: {key} must be true or false, not {quote_json(value)}.")
    if value:
        return [f"--{key}"]
    opposite = f"--no-{key}"
    return [opposite] if opposite in options else []

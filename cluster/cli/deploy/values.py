"""Reads Helm values for the chart, and checks them against its schema."""

from __future__ import annotations

import json
import re
from functools import reduce
from typing import TYPE_CHECKING, Any

import jsonschema
import yaml

from pagedray.errors import StartupError
from pagedray.text import nearest_name, quote_json

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Values", "read_values", "schema_errors", "spelling_errors"]

# Any: YAML.
Values = dict[str, Any]

# YAML 1.1, YAML 1.2 and Go's YAML read these differently, or JSON has none of them.
_AMBIGUOUS = re.compile(
    r"""
    [-+]?0o?[0-9_]+                               # octal numbers
    | [-+]?[0-9][0-9_]*(:[0-5]?[0-9])+            # sexagesimal ones
    | [-+]?[0-9]+_[0-9_]*                         # with groups of digits
    | [-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)e[-+]?[0-9]+  # with an exponent
    | [-+]?\.(inf|nan)
    | y | n
    """,
    re.IGNORECASE | re.VERBOSE,
)
_KEY_TAGS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}
_NOT_TEXT = "put it in quotes: without them, YAML reads no, off and yes as booleans"


def read_values(paths: Sequence[Path], chart: Path) -> Values:
    """Return the values of files, where later files win, with the defaults of the chart.

    Raises StartupError.
    """
    given = [_read(path) for path in paths]
    if not chart.is_dir():
        raise StartupError(
            f"There is no chart {chart}; run this in a checkout of PagedRay, or use --chart."
        )
    defaults = _read(chart / "values.yaml")
    return reduce(_merged, given, defaults)


def spelling_errors(path: Path) -> list[str]:
    """Return a line for each value that YAML readers, such as Helm's, understand differently."""
    try:
        root = yaml.compose(path.read_text(), _StrictLoader)
    except OSError as error:
        raise StartupError(f"Cannot read {path}: {error.strerror}.") from error
    return list(_ambiguous(root, ""))


# Any: PyYAML's nodes.
def _ambiguous(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.tag not in _KEY_TAGS or _AMBIGUOUS.fullmatch(key.value):
                where = f"{path}: " if path else ""
                yield f"{where}put the key {key.value!s:.40} in quotes, or it is not read as text."
            yield from _ambiguous(value, f"{path}.{key.value}".lstrip("."))
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _ambiguous(value, f"{path}.{number}")
    elif node is not None and node.style is None and _AMBIGUOUS.fullmatch(node.value):
        yield (
            f"{path}: YAML readers disagree about {node.value:.40}; write a plain number, or "
            f'text in quotes: "{node.value:.40}".'
        )


def schema_errors(values: Values, chart: Path) -> list[str]:
    """Return a line for each value that the chart rejects, with its path and the allowed values."""
    try:
        schema = json.loads((chart / "values.schema.json").read_text())
    except OSError as error:
        raise StartupError(f"Cannot read the chart {chart}: {error.strerror}.") from error
    found = _Validator(schema).iter_errors(values)
    return sorted({_line(error) for error in found})


def _line(error: jsonschema.ValidationError) -> str:
    path = ".".join(str(step) for step in error.absolute_path)
    # Any: JSON.
    schema: Any = error.schema
    instance: Any = error.instance
    if error.validator == "additionalProperties":
        unknown = sorted(map(str, set(instance) - set(schema.get("properties", ()))))
        where = ".".join([*([path] if path else []), unknown[0][:80]])
        nearest = nearest_name(unknown[0], schema.get("properties", ()))
        if nearest is not None:
            return f"{where}: the chart has no such value; did you mean {nearest}?"
        hint = f"; it takes {schema['description']}" if "description" in schema else ""
        return f"{where}: the chart has no such value{hint}."
    if error.validator == "required":
        missing = next(name for name in schema["required"] if name not in instance)
        where = ".".join([*([path] if path else []), missing])
        return f"{where}: null removes the chart's value, which is required."
    where = f"{path}: " if path else ""
    return f"{where}{quote_json(error.instance)} must be {_wanted(error)}."


def _wanted(error: jsonschema.ValidationError) -> str:
    # Any: JSON.
    schema: Any = error.schema
    value: Any = error.validator_value
    if error.validator == "type" and value == "string":
        return f"text; {_NOT_TEXT if isinstance(error.instance, bool) else 'put it in quotes'}"
    if "description" in schema:
        return str(schema["description"])
    match error.validator:
        case "enum":
            return f"one of {', '.join(value)}"
        case "type":
            return f"of type {value if isinstance(value, str) else ' or '.join(value)}"
        case "minimum":
            return f"at least {value}"
        case "maximum":
            return f"at most {value}"
        case other:
            return f"valid ({other}: {value})"


def _merged(defaults: Values, given: Values) -> Values:
    """Return the values as Helm merges them: mappings by key, everything else as a whole."""
    merged = dict(defaults)
    for name, value in given.items():
        default = merged.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            merged[name] = _merged(default, value)
        elif value is None and name in merged:
            # Null removes a default.
            del merged[name]
        else:
            merged[name] = value
    return merged


def _read(path: Path) -> Values:
    try:
        found = yaml.load(path.read_text(), _StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise StartupError(f"Cannot read {path}: {reason}.") from error
    # A date may be out of range, and an integer too long.
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise StartupError(f"{path} is not valid YAML: {reason:.200}.") from error
    if not isinstance(found, dict):
        raise StartupError(f"{path} must have lines such as `model: Qwen/Qwen3-8B`.")
    return found


class _StrictLoader(yaml.SafeLoader):
    """Rejects a key that occurs twice, of which YAML would take the last, and endless values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._open_anchors: list[str | None] = []

    # Any: PyYAML's nodes.
    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()  # type: ignore[no-untyped-call]  # as all of PyYAML's composer
        if isinstance(event, yaml.AliasEvent) and event.anchor in self._open_anchors:
            raise yaml.YAMLError(f"the value {event.anchor} contains itself")
        self._open_anchors.append(event.anchor)
        node = super().compose_node(parent, index)
        self._open_anchors.pop()
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        # A mapping that is merged with `<<` may have the same keys.
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key.value, str)]
        if len(set(keys)) < len(keys):
            raise yaml.MarkedYAMLError(
                problem="it has a duplicate key", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep=deep)


def _pattern_errors(
    validator: jsonschema.protocols.Validator, pattern: str, instance: object, schema: object
) -> Iterator[jsonschema.ValidationError]:
    """Yield an error unless a string matches as in Helm, where `$` is the end of the string."""
    del validator, schema
    if isinstance(instance, str) and not re.search(pattern.replace("$", r"\Z"), instance):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


_Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]  # stubs without types
    jsonschema.Draft7Validator, {"pattern": _pattern_errors}
)

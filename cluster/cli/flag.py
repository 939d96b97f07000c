"""Flags, their values and groups, and whether a command received a flag."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.engine.vllm_options import ALIASES, own_value

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "Flag",
    "MergedObject",
    "NotedFlag",
    "add_flag",
    "count",
    "flag_adder",
    "group_of",
    "names",
    "noted_flags",
    "number",
    "read_object",
    "read_value",
    "seconds",
]

_WORDS: Mapping[str, object] = {"False": False, "None": None, "True": True}

_DEST = "noted_flags"


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of options as a flag."""

    field: str
    help: str
    """Names the default only where the parser cannot: None, which selects a default."""
    kind: type | tuple[str, ...] | Callable[[str], object] = str
    """The type of its value, or its allowed values."""
    metavar: str | None = "N"
    aliases: tuple[str, ...] = ()
    """Short names; vLLM's long names are in `ALIASES`."""


class MergedObject(argparse.Action):
    """Stores a JSON object; flags that are given together make one object."""

    # Any: argparse's own arguments.
    def __call__(self, _: Any, namespace: Any, values: Any, option: Any = None) -> None:
        given = getattr(namespace, self.dest)
        others = {} if given is self.default else given
        setattr(namespace, self.dest, {**others, **values})


class _OptionalChoices(tuple[str, ...]):
    """Allowed values of a flag, and None, which some of vLLM's values are."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return value is None or super().__contains__(value)


def group_of(parser: argparse.ArgumentParser, title: str) -> argparse._ArgumentGroup:
    """Return the group of flags with a title, which is added if the parser lacks it."""
    for group in parser._action_groups:
        if group.title == title:
            return group
    return parser.add_argument_group(title)


def add_flag(group: argparse._ArgumentGroup, flag: Flag, default: object) -> None:
    """Add a flag with the default of its field; vLLM's values of it are translated."""
    name, *others = [
        f"--{one.replace('_', '-')}"
        for one in (flag.field, *(other for other, own in ALIASES.items() if own == flag.field))
    ]
    # Any: argparse takes other arguments for each kind of flag.
    more: dict[str, Any] = {"dest": flag.field, "help": flag.help}
    if flag.kind is bool:
        opposite: list[str] = others if default is True else [f"--no-{name[2:]}"]
        if default is True:
            name = name.replace("--enable-", "--no-")
            others = [f"--no-{other[2:]}" for other in others]
        more |= {"action": "store_const", "const": not default, "default": default}
        if opposite:
            hidden = {**more, "const": default, "help": argparse.SUPPRESS}
            group.add_argument(*opposite, **hidden)
    elif flag.kind is read_object:
        more |= {"action": MergedObject, "type": read_object, "metavar": flag.metavar}
    elif isinstance(flag.kind, tuple):
        choices = _OptionalChoices(flag.kind)
        more |= {"choices": choices, "default": default, "type": _translation(flag.field)}
        more["metavar"] = f"{{{','.join(flag.kind)}}}"
    else:
        kind = _translation(flag.field) if flag.kind is str else flag.kind
        more |= {"type": kind, "default": default, "metavar": flag.metavar}
    group.add_argument(name, *flag.aliases, *others, **more)


def flag_adder(group: argparse._ActionsContainer) -> Callable[..., None]:
    """Return a function that adds flags to a group.

    The function takes the text `--flag VALUE: help`, the type or the allowed values, and the
    default. A flag without a value is a switch.
    """

    # Any: argparse's own arguments.
    def add(text: str, kind: Any = str, default: object = None, **more: Any) -> None:
        head, _, what = text.partition(": ")
        flags = [word for word in head.split() if word.startswith("-")]
        values = [word for word in head.split() if not word.startswith("-")]
        if isinstance(kind, tuple):
            more["choices"] = kind
        elif values or default is not None:
            more["type"] = kind
        else:
            more["action"] = "store_true"
        if values:
            more["metavar"] = values[0]
        if default is not None:
            more["default"] = default
        group.add_argument(*flags, help=what, **more)

    return add


def _translation(field: str) -> Callable[[str], object]:
    """Return a converter of vLLM's values of a flag to ours."""
    return lambda text: own_value(field, text)


def read_value(text: str) -> object:
    """Return the value of a word: JSON, True, False or None of Python, or else the word itself."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_object(text: str) -> dict[str, object]:
    """Return a JSON object."""
    value = read_value(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"key\": 1}}', not {text!r:.80}"
        )
    return value


def names(text: str) -> tuple[str, ...]:
    """Return the names in a list that is separated by commas, or in a JSON list as in vLLM."""
    listed = read_value(text)
    given = listed if isinstance(listed, list) else text.split(",")
    found = tuple(name.strip() if isinstance(name, str) else "" for name in given)
    if not all(found):
        raise argparse.ArgumentTypeError(f"must be names separated by commas, not {text!r}")
    return found


def count(low: int, high: int) -> Callable[[str], int]:
    """Return a converter of texts to integers in a range."""

    def convert(text: str) -> int:
        value = int(text) if text.isdecimal() and len(text) < 20 else -1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be from {low} to {high}, not {text!r}")
        return value

    return convert


def number(low: float, high: float, unit: str = "") -> Callable[[str], float]:
    """Return a converter of texts to numbers in a range."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(
                f"must be from {low:g} to {high:g}{unit}, not {text!r}"
            )
        return value

    return convert


def seconds(low: float, high: float) -> Callable[[str], float]:
    """Return a converter of texts to seconds in a range."""
    return number(low, high, " seconds")


class NotedFlag(argparse.Action):
    """Stores the value of a flag, and notes that the flag was given."""

    # Any: argparse's own arguments.
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, _DEST, (*noted_flags(namespace), option))


def noted_flags(parsed: argparse.Namespace) -> Sequence[str]:
    """Return the flags with the action `NotedFlag` that were given, in their order."""
    flags: Sequence[str] = getattr(parsed, _DEST, ())
    return flags

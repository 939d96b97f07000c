"""A flag of the command line for a field of options."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cluster.cli.flags.flag_values import read_object
from cluster.engine.options.vllm_option_notes import ALIASES
from cluster.engine.options.vllm_options import own_value

__all__ = ["Flag", "MergedObject", "add_flag", "group_of"]


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


def _translation(field: str) -> Callable[[str], object]:
    """Return a converter of vLLM's values of a flag to ours."""
    return lambda text: own_value(field, text)

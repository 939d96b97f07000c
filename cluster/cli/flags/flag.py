"""A flag of the command line for a field of options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cluster.engine.options.vllm_options import own_value

if TYPE_CHECKING:
    import argparse

__all__ = ["Flag", "add_flag"]


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of options as a flag."""

    field: str
    help: str
    """Names the default only where the parser cannot: None, which selects one."""
    kind: type | tuple[str, ...] | Callable[[str], object] = str
    """The type of its value, or its allowed values."""
    metavar: str | None = "N"
    aliases: tuple[str, ...] = ()
    """Names of the same flag in vLLM."""


class _OptionalChoices(tuple[str, ...]):
    """Allowed values of a flag whose default is None, which some of vLLM's values are."""

    __slots__ = ()

    def __contains__(self, value: object) -> bool:
        return value is None or super().__contains__(value)


def add_flag(group: argparse._ArgumentGroup, flag: Flag, default: object) -> None:
    """Add a flag with the default of its field; vLLM's values of it are translated."""
    name = f"--{flag.field.replace('_', '-')}"
    # Any: argparse takes other arguments for each kind of flag.
    more: dict[str, Any] = {"dest": flag.field, "help": flag.help}
    if default is True:
        name = name.replace("--enable-", "--no-")
        more["action"] = "store_false"
    elif flag.kind is bool:
        more["action"] = "store_true"
    elif isinstance(flag.kind, tuple):
        choices = flag.kind if default is not None else _OptionalChoices(flag.kind)
        more |= {"choices": choices, "default": default, "type": _translation(flag.field)}
        more["metavar"] = f"{{{','.join(flag.kind)}}}"
    else:
        kind = _translation(flag.field) if flag.kind is str else flag.kind
        more |= {"type": kind, "default": default, "metavar": flag.metavar}
    group.add_argument(name, *flag.aliases, **more)


def _translation(field: str) -> Callable[[str], object]:
    """Return a converter of vLLM's values of a flag to ours."""
    return lambda text: own_value(field, text)

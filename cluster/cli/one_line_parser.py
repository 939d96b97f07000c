"""A parser of flags whose errors are one line, with the known flag that an unknown one is like."""

from __future__ import annotations

import argparse
import difflib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["USAGE_EXIT", "OneLineParser", "command_parser", "dashed_flag"]

USAGE_EXIT = 2
_MAX_LIKELY = 3


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of a flag to its help, unless it is None or a switch."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose error message is one line.

    Flags may be written with `_` for `-`, as vLLM's. They are not abbreviated: a flag that is added
    later would make an abbreviation mean something else.
    """

    # Any: argparse's own arguments, here and below.
    def __init__(self, **arguments: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **arguments)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; an error names the known flag that an unknown one is like."""
        words = sys.argv[1:] if args is None else args
        parsed, unknown = self.parse_known_args([*_with_dashes(words)], namespace)
        if unknown:
            parser: argparse.ArgumentParser = self
            for word in words:
                parser = command_parser(parser, word)
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(word, parser)}")
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments and the unknown ones.

        Without any, print the help if it lists what to choose from.
        """
        words = sys.argv[1:] if args is None else args
        if not words and any(one.choices for one in self._get_positional_actions()):
            self.print_help()
            self.exit()
        return super().parse_known_args(words, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(_unknown_command(value, [*action.choices], self.prog))
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        # Those of argparse have no full stop.
        what = message.removesuffix(".")
        self.exit(USAGE_EXIT, f"{self.prog}: error: {what} (see {self.prog} --help)\n")


def _unknown_command(word: str, commands: Sequence[str], program: str) -> str:
    """Return the error of a word that is not a command, with the command that it is like."""
    what = f"{word:.80} is not a command"
    likely = [one for one in commands if one.startswith(word) or word.startswith(one)]
    likely = likely or difflib.get_close_matches(word, commands, n=1, cutoff=0.6)
    if likely:
        return f"{what}; did you mean {' or '.join(likely[:_MAX_LIKELY])}?"
    if "/" in word and "serve" in commands:
        return f"{what}; did you mean {program} serve {word:.80}?"
    return f"{what}; choose from {', '.join(commands)}"


def dashed_flag(word: str) -> str:
    """Return a word, with dashes in the name if it is a flag."""
    name, *value = word.split("=", 1)
    return "=".join((name.replace("_", "-"), *value)) if word.startswith("--") else word


def _with_dashes(words: Sequence[str]) -> Iterator[str]:
    is_flag_allowed = True
    for word in words:
        # What follows a `--` is not a flag.
        is_flag_allowed = is_flag_allowed and word != "--"
        yield dashed_flag(word) if is_flag_allowed else word


def _hint(word: str, parser: argparse.ArgumentParser) -> str:
    """Return which flags a word abbreviates or is like, to be added to an error."""
    name = word.partition("=")[0]
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    begun = [
        flag
        for flag in flags
        if flag.startswith(name)
        and len(name) > 2
        and parser._option_string_actions[flag].help != argparse.SUPPRESS
    ]
    likely = begun[:_MAX_LIKELY] or difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
    return f"; did you mean {' or '.join(likely)}?" if likely else ""


def command_parser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, or `parser` if there is no such command."""
    for action in parser._actions:
        if isinstance(action.choices, dict) and command in action.choices:
            found: argparse.ArgumentParser = action.choices[command]
            return found
    return parser

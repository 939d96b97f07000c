"""A parser of flags whose errors are one line, with the known flag that an unknown one is like."""

from __future__ import annotations

import argparse
import difflib
from typing import Any, NoReturn

__all__ = ["USAGE_EXIT", "OneLineParser", "command_parser"]

USAGE_EXIT = 2


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the default of a flag to its help, unless it is None or a switch."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """A parser whose error message is one line."""

    # Any: argparse's own arguments, in both.
    def __init__(self, **arguments: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, **arguments)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; an error names the known flag that an unknown one is like."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = command_parser(self, getattr(parsed, "command", ""))
            flags = [name for name in parser._option_string_actions if name.startswith("--")]
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            nearest = difflib.get_close_matches(word.partition("=")[0], flags, n=1, cutoff=0.75)
            hint = f"; did you mean {nearest[0]}?" if nearest else ""
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_EXIT, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def command_parser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    """Return the parser of a command, or `parser` if there is no such command."""
    for action in parser._actions:
        if isinstance(action.choices, dict) and command in action.choices:
            found: argparse.ArgumentParser = action.choices[command]
            return found
    return parser

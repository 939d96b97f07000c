"""A parser of flags with errors in one line, which name similar flags."""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

from cluster.cli.flags.flag_values import read_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MODEL_FLAG", "USAGE_EXIT", "OneLineParser", "command_parser", "operands"]

USAGE_EXIT = 2
MODEL_FLAG = "--model"
_MAX_LIKELY = 3
_FIELD = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+\+?)(?:=(.*))?", re.DOTALL)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of a flag unless it is None or a switch, and no long names of vLLM's."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        first, *others = action.option_strings or ("",)
        if not first:
            return super()._format_action_invocation(action)
        shown = ", ".join((first, *(one for one in others if first[:2] != "--" or one[:2] != "--")))
        if action.nargs == 0:
            return shown
        return f"{shown} {self._format_args(action, action.dest.upper())}"

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class OneLineParser(argparse.ArgumentParser):
    """A parser with error messages in one line.

    As in vLLM, flags may be written with `_` for `-`, a flag of a JSON object field by field
    (`--flag.key VALUE`), and MODEL as `--model`. Flags are not abbreviated: a flag that is added
    later would make an abbreviation mean something else.
    """

    # Any: argparse's own arguments, here and below.
    def __init__(self, **arguments: Any) -> None:
        super().__init__(formatter_class=_HelpFormatter, allow_abbrev=False, **arguments)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments; an error about an unknown flag names a similar flag."""
        words = [*_with_dashes(sys.argv[1:] if args is None else args)]
        parser: argparse.ArgumentParser = self
        num_commands = 0
        for word in words:
            command = command_parser(parser, word)
            num_commands += command is not parser
            parser = command
        given = _with_objects(words[num_commands:], parser)
        given = _with_model(given, parser)
        parsed, unknown = self.parse_known_args([*words[:num_commands], *given], namespace)
        if unknown:
            word = next((one for one in unknown if one.startswith("-")), unknown[0])
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{_hint(word, parser)}")
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Return the arguments and the unknown arguments.

        Without any, print the help if it lists commands to choose from.
        """
        words = sys.argv[1:] if args is None else args
        if not words and any(one.choices for one in self._get_positional_actions()):
            self.print_help()
            self.exit()
        parsed, unknown = super().parse_known_args(words, namespace)
        # argparse takes an optional operand to be missing if a flag precedes it and follows another
        # operand.
        for action in self._get_positional_actions():
            is_missing = action.nargs == "?" and getattr(parsed, action.dest) is None
            if is_missing and unknown and not unknown[0].startswith("-"):
                setattr(parsed, action.dest, unknown.pop(0))
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(_unknown_command(value, [*action.choices], self.prog))
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        # Messages of argparse have no full stop.
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


def operands(words: Sequence[str], options: Mapping[str, argparse.Action]) -> list[str]:
    """Return the words of a command that are neither flags nor values of flags."""
    found: list[str] = []
    num_values = 0.0
    for word in words:
        if word.startswith("-"):
            action = options.get(_dashed_flag(word.partition("=")[0]))
            takes_one = action is not None and action.nargs in (None, "?") and "=" not in word
            takes_all = action is not None and action.nargs in ("+", "*") and "=" not in word
            num_values = float("inf") if takes_all else takes_one
        elif num_values < 1.0:
            found.append(word)
        else:
            num_values -= 1.0
    return found


def _dashed_flag(word: str) -> str:
    """Return a word, with dashes in the name if it is a flag."""
    name, *value = word.split("=", 1)
    flag, *keys = name.split(".", 1)
    dashed = ".".join((flag.replace("_", "-"), *keys))
    return "=".join((dashed, *value)) if word.startswith("--") else word


def _with_dashes(words: Sequence[str]) -> Iterator[str]:
    is_flag_allowed = True
    for word in words:
        # Words after a `--` are not flags.
        is_flag_allowed = is_flag_allowed and word != "--"
        yield _dashed_flag(word) if is_flag_allowed else word


def _with_model(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words with MODEL as the first operand, if it is given as `--model`."""
    options = parser._option_string_actions
    num_operands = sum(not action.option_strings for action in parser._actions)
    if MODEL_FLAG not in options or options[MODEL_FLAG].help != argparse.SUPPRESS:
        return words
    rest: list[str] = []
    model: str | None = None
    remaining = iter(words)
    for word in remaining:
        name, is_joined, value = word.partition("=")
        if name == MODEL_FLAG:
            model = value if is_joined else next(remaining, None)
            if not model:
                parser.error(f"{MODEL_FLAG} requires a folder or a Hub id")
        else:
            rest.append(word)
    found = operands(rest, options)
    if model is None or model in found:
        return rest
    if len(found) >= num_operands:
        parser.error(f"the model is given twice: {found[0]} and {MODEL_FLAG} {model}")
    return [model, *rest]


def _with_objects(words: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the words, with flags such as `--config.key VALUE` merged to JSON objects."""
    options = parser._option_string_actions
    bases = {found[1] for word in words if (found := _FIELD.fullmatch(word))} & options.keys()
    objects: dict[str, dict[str, Any]] = {}  # Any: JSON
    rest: list[str] = []
    remaining = iter(words)
    for word in remaining:
        name, is_joined, value = word.partition("=")
        field = _FIELD.fullmatch(word)
        flag = field[1] if field else name
        if flag not in bases:
            rest.append(word)
            continue
        text = value if is_joined else next(remaining, "")
        whole = objects.setdefault(flag, {})
        if field is not None:
            _set_field(whole, field[2], read_value(text))
        elif isinstance(one := read_value(text), dict):
            whole |= one
        else:
            parser.error(f"{flag} must be a JSON object, because {flag}. fields are given, too")
    return [*rest, *(f"{flag}={json.dumps(whole)}" for flag, whole in objects.items())]


def _set_field(whole: dict[str, Any], path: str, value: object) -> None:  # Any: JSON
    """Set a field of an object, such as `a.b`; `a.b+` appends to a list."""
    *above, last = path.split(".")
    for key in above:
        inner = whole.setdefault(key, {})
        if not isinstance(inner, dict):
            inner = whole[key] = {}
        whole = inner
    if last.endswith("+"):
        whole.setdefault(last[:-1], []).append(value)
    else:
        whole[last] = value


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
        and parser._option_string_actions[flag].option_strings[0] == flag
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

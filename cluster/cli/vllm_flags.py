"""Flags of `vllm serve` that we do not have: flags without effect, and rejected flags."""

from __future__ import annotations

import argparse
import json
import logging
import re
from typing import TYPE_CHECKING, Any

from cluster.cli.flag import read_value
from cluster.engine.vllm_options import (
    IGNORED,
    IGNORED_SWITCHES,
    LISTS,
    REJECTED,
    WITHOUT_EFFECT,
    ignored_reason,
    is_our_behavior,
    notice_level,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_vllm_flags", "flag_notes", "ignored_flags", "log_ignored_flags"]

logger = logging.getLogger(__name__)

_SHORT: Mapping[str, str] = {
    "api_server_count": "-asc",
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_address": "-dpa",
    "data_parallel_backend": "-dpb",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_multi_port_external_lb": "-dpm",
    "data_parallel_rank": "-dpn",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "data_parallel_start_rank": "-dpr",
    "decode_context_parallel_size": "-dcp",
    "kernel_config": "-kc",
    "nnodes": "-n",
    "node_rank": "-r",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
    "prefill_context_parallel_size": "-pcp",
    "speculative_config": "-sc",
}
_OPTION = re.compile(r"(?<!-)\b(?:task|quantization|[a-z]+(?:_[a-z]+)+)\b")
_DEST = "ignored_flags"


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the parser lacks, hidden from the help."""
    for name in (*IGNORED, *REJECTED):
        if _is_switch(name):
            _add(parser, name, _flags(name), nargs=0, const=True)
            _add(parser, name, [_flag(f"no_{name}")], nargs=0, const=False)
        else:
            _add(parser, name, _flags(name), nargs="*" if name in LISTS else "?", const=True)


def log_ignored_flags(parsed: argparse.Namespace) -> None:
    """Log a line for each given flag that has no effect."""
    for name, line in ignored_flags(parsed).items():
        logger.log(notice_level(name), "%s", line)


def ignored_flags(parsed: argparse.Namespace) -> Mapping[str, str]:
    """Return the options of given flags that have no effect, with a line on each."""
    found: Mapping[str, str] = getattr(parsed, _DEST, {})
    return found


def flag_notes(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return flags of vLLM that are missing or have other names here, with a note on each.

    `parser` is the parser of `pagedray serve`.
    """
    notes: dict[str, str] = {}
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and action.dest != "help":
            own, *others = action.option_strings or ("",)
            notes |= dict.fromkeys(others, f"the same as `{own}`")
    notes["--enable-prefix-caching"] = "the default"
    for name, reason in {**IGNORED, **REJECTED}.items():
        if _flag(name) not in notes and isinstance(_action(parser, name), _VllmFlag):
            kind = "no effect" if name in IGNORED else f"rejected{_exceptions(name)}"
            if name in REJECTED and _is_switch(name) and is_our_behavior(name, value=True):
                kind = "the default; its opposite is rejected"
            notes[_flag(name)] = f"{kind}: {reason}"
    return sorted((flag, _with_flags(note, parser, mark="`")) for flag, note in notes.items())


# Any: argparse's own arguments.
def _add(parser: argparse.ArgumentParser, name: str, flags: list[str], **more: Any) -> None:
    lacking = [flag for flag in flags if flag not in parser._option_string_actions]
    if lacking:
        parser.add_argument(
            *lacking, action=_VllmFlag, dest=_DEST, name=name, help=argparse.SUPPRESS, **more
        )


def _action(parser: argparse.ArgumentParser, name: str) -> argparse.Action | None:
    return parser._option_string_actions.get(_flag(name))


def _is_switch(name: str) -> bool:
    """Return whether an option is true or false, so that it has a `--no-` form."""
    known = WITHOUT_EFFECT.get(name, ())
    return name in IGNORED_SWITCHES or any(isinstance(value, bool) for value in known)


def _with_flags(text: str, parser: argparse.ArgumentParser, *, mark: str = "") -> str:
    """Return a text with the names of options as the command line writes them."""

    def write(found: re.Match[str]) -> str:
        action = _action(parser, found[0])
        is_ours = action is not None and action.help != argparse.SUPPRESS
        return f"{mark}{_flag(found[0])}{mark}" if is_ours else found[0]

    return _OPTION.sub(write, text)


def _exceptions(name: str) -> str:
    """Return the values that are not rejected, if a user could write some."""
    values = [value for value in WITHOUT_EFFECT.get(name, ()) if not isinstance(value, bool)]
    shown = [f"`{value if isinstance(value, str) else json.dumps(value)}`" for value in values]
    return f", except for {' and '.join(shown)}" if shown else ""


def _flags(name: str) -> list[str]:
    return [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Any: argparse's own arguments, in both.
class _VllmFlag(argparse.Action):
    """Notes a flag that has no effect, or ends the command with the reason to reject it."""

    def __init__(self, *arguments: Any, name: str, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "default": argparse.SUPPRESS})
        self._name = name

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None
    ) -> None:
        value = self._value(values)
        # A short name says little.
        option = self.option_strings[0] if option.count("-") == 1 else option
        if reason := ignored_reason(self._name, value):
            line = f"{option} has no effect: {_with_flags(reason, parser)}."
            setattr(namespace, _DEST, {**getattr(namespace, _DEST, {}), self._name: line})
        elif not is_our_behavior(self._name, value):
            parser.error(f"{option} is not supported: {_with_flags(REJECTED[self._name], parser)}")

    def _value(self, values: Any) -> object:
        if self.nargs == 0:
            return self.const
        if isinstance(values, list):
            return [read_value(one) for one in values]
        return read_value(values) if isinstance(values, str) else values

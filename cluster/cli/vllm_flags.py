"""Flags of `vllm serve` that we do not have: those without effect, and those that are refused."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from cluster.engine.vllm_options import IGNORED, REFUSED, WITHOUT_EFFECT

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_vllm_flags", "flag_notes"]

_SWITCHES_IGNORED = (
    "--disable-log-requests",
    "--disable-log-stats",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
    "--enable-log-requests",
    "--enable-prefix-caching",
)
_REFUSED: Mapping[str, str] = {
    "lora_modules": "merge the adapter into the weights",
    "model": "the model is the first argument: pagedray serve MODEL",
    "override_generation_config": "edit generation_config.json in the folder of the model",
    "root_path": "let a proxy remove the prefix of the path",
    "seed": "requests set their own seed",
    "uvicorn_log_level": "use --log-level",
}
_SHORT = {"data_parallel_size": "-dp", "pipeline_parallel_size": "-pp"}
_NOT_FLAGS = frozenset(("enable_chunked_prefill",))


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, hidden from the help."""
    hidden = argparse.SUPPRESS
    for flag in _SWITCHES_IGNORED:
        parser.add_argument(flag, action=_Ignore, nargs=0, help=hidden)
    parser.add_argument(
        "--no-enable-prefix-caching", action="store_false", dest="enable_prefix_cache", help=hidden
    )
    switches = {flag[2:].replace("-", "_") for flag in _SWITCHES_IGNORED}
    for name in sorted(IGNORED.keys() - switches):
        parser.add_argument(_flag(name), action=_Ignore, nargs="?", help=hidden)
    for name, reason in sorted({**REFUSED, **_REFUSED}.items()):
        if name not in _NOT_FLAGS:
            allowed = tuple(str(value) for value in WITHOUT_EFFECT.get(name, ()))
            flags = [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]
            parser.add_argument(*flags, action=_Refuse, reason=reason, allowed=allowed, help=hidden)


def flag_notes(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return flags of vLLM that are other ones here, or none, with a note on each.

    `parser` is that of `pagedray serve`.
    """
    notes = dict.fromkeys(_SWITCHES_IGNORED, "has no effect")
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and action.dest != "help":
            own, *others = action.option_strings or ("",)
            notes |= dict.fromkeys(others, f"the same as `{own}`")
    notes["--no-enable-prefix-caching"] = "the same as `--no-prefix-cache`"
    notes["--trust-remote-code"] = "is refused: code from a checkpoint is never run"
    for name, reason in IGNORED.items():
        notes[_flag(name)] = f"has no effect: {reason}"
    for name, reason in {**REFUSED, **_REFUSED}.items():
        if name not in _NOT_FLAGS:
            notes[_flag(name)] = f"is refused: {reason}"
    return sorted(notes.items())


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Any: argparse's own arguments, in both.
class _Ignore(argparse.Action):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "dest": argparse.SUPPRESS})

    def __call__(self, *_: Any) -> None:
        pass


class _Refuse(argparse.Action):
    def __init__(
        self, *arguments: Any, reason: str, allowed: tuple[str, ...], **options: Any
    ) -> None:
        super().__init__(*arguments, **{**options, "dest": argparse.SUPPRESS, "nargs": "?"})
        self._reason = reason
        self._allowed = allowed

    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, value: Any, option: str | None = None
    ) -> None:
        if value is None or value not in self._allowed:
            parser.error(f"{option} is not supported: {self._reason}")

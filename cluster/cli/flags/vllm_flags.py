"""Flags of `vllm serve` that we do not have: those without effect, and those that are rejected."""

from __future__ import annotations

import argparse
import json
import re
from typing import TYPE_CHECKING, Any

from cluster.engine.options.vllm_option_notes import (
    IGNORED,
    IGNORED_SWITCHES,
    REJECTED,
    WITHOUT_EFFECT,
    has_no_effect,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["add_vllm_flags", "flag_notes"]

# Options of the engine are in `vllm_option_notes`; these are of the server alone.
_SWITCHES_IGNORED: Mapping[str, str] = {
    "disable_fastapi_docs": "/docs only shows the API of the server",
    "disable_frontend_multiprocessing": "scheduler and frontends run in threads of the server",
    "disable_uvicorn_access_log": "log_level warning omits the line of each call",
    "enable_auto_tool_choice": "models may call tools whenever the request has tools",
    "enable_offline_docs": "/docs does not need a network",
    "enable_prompt_tokens_details": "usage always includes them",
    "enable_reasoning": "reasoning_format says how the model marks its reasoning",
    "enable_request_id_headers": "responses always return the X-Request-Id of the client",
    "enable_server_load_tracking": "/load is always available",
    "enable_ssl_refresh": "certificates are reloaded when they change",
    "exclude_tools_when_tool_choice_none": "prompts never contain tools that may not be called",
    "log_error_stack": "internal errors are always logged with their stack trace",
}
_VALUES_IGNORED: Mapping[str, str] = {
    "api_server_count": "one event loop runs all frontends",
    "disable_access_log_for_endpoints": "only requests to the model are logged",
    "fingerprint_mode": "responses have no system_fingerprint",
    "fingerprint_value": "responses have no system_fingerprint",
    "h11_max_header_count": "heads of requests have fixed limits",
    "h11_max_incomplete_event_size": "heads of requests have fixed limits",
    "max_log_len": "the texts of requests are never logged",
}
_REJECTED: Mapping[str, str] = {
    "allow_credentials": "clients send their API key in a header",
    "allowed_headers": "only the headers of the API are allowed",
    "allowed_methods": "only the methods of the API are allowed",
    "chat_template_content_format": "content is passed to the chat template as text",
    "default_chat_template_kwargs": "requests set chat_template_kwargs",
    "enable_force_include_usage": "requests set stream_options.include_usage",
    "enable_per_request_metrics": "the log and the traces contain the times of each call",
    "enable_tokenizer_info_endpoint": "/tokenizer_info is not available",
    "headless": "a server always runs its own frontends",
    "log_config_file": "use --log-format and --log-level",
    "lora_modules": "merge the adapter into the weights",
    "middleware": "use a proxy in front of the server",
    "model": "the model is the first argument: pagedray serve MODEL",
    "otlp_traces_endpoint": "use --otlp-endpoint with the HTTP port of the collector",
    "reasoning_parser_plugin": "third-party code is not loaded; see --reasoning-format",
    "response_role": "the role is always assistant",
    "return_tokens_as_token_ids": "requests set return_tokens_as_token_ids",
    "root_path": "remove the prefix of the path in a proxy",
    "seed": "requests set their own seed",
    "ssl_ca_certs": "use --tls-client-ca, which requires client certificates",
    "ssl_cert_reqs": "--tls-client-ca requires certificates of clients",
    "ssl_ciphers": "the ciphers are OpenSSL's defaults for TLS 1.2 and 1.3",
    "tokens_only": "all endpoints are always served",
    "tool_parser_plugin": "third-party code is not loaded; see --tool-call-format",
    "tool_server": "tools are run by the client",
    "uds": "use --host and --http-port",
    "uvicorn_log_level": "use --log-level",
}
_WITHOUT_EFFECT: Mapping[str, tuple[object, ...]] = {
    "allow_credentials": (False,),
    "allowed_headers": (["*"],),
    "allowed_methods": (["*"],),
    "chat_template_content_format": ("auto", "string"),
    "default_chat_template_kwargs": ({},),
    "enable_force_include_usage": (False,),
    "enable_per_request_metrics": (False,),
    "enable_tokenizer_info_endpoint": (False,),
    "headless": (False,),
    "response_role": ("assistant",),
    "return_tokens_as_token_ids": (False,),
    "ssl_cert_reqs": (0,),
    "tokens_only": (False,),
}
_SHORT: Mapping[str, str] = {
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_size": "-dp",
    "data_parallel_size_local": "-dpl",
    "decode_context_parallel_size": "-dcp",
    "optimization_level": "-O",
    "pipeline_parallel_size": "-pp",
}
_OPTION = re.compile(r"\b(?:task|[a-z]+(?:_[a-z]+)+)\b")
_WORDS: Mapping[str, object] = {"False": False, "None": None, "True": True}
# Flags with other forms than their `--no-`.
_OWN_SWITCHES: Mapping[str, str] = {"enable_prefix_caching": "prefix caching is on by default"}


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, hidden from the help."""
    hidden = argparse.SUPPRESS
    for name in (*IGNORED_SWITCHES, *_SWITCHES_IGNORED, *_OWN_SWITCHES):
        flags = [_flag(name)] if name in _OWN_SWITCHES else [_flag(name), _flag(f"no_{name}")]
        parser.add_argument(*flags, action=_Ignore, nargs=0, help=hidden)
    parser.add_argument(
        "--no-enable-prefix-caching", action="store_false", dest="enable_prefix_cache", help=hidden
    )
    for name in (*(IGNORED.keys() - IGNORED_SWITCHES.keys()), *_VALUES_IGNORED):
        parser.add_argument(*_flags(name), action=_Ignore, nargs="?", help=hidden)
    for name, reason in {**REJECTED, **_REJECTED}.items():
        opposite = _flag(f"no_{name}")
        if _has_no_effect(name, value=True):
            parser.add_argument(_flag(name), action=_Ignore, nargs=0, help=hidden)
            parser.add_argument(opposite, action=_Reject, reason=reason, name=None, help=hidden)
            continue
        parser.add_argument(*_flags(name), action=_Reject, reason=reason, name=name, help=hidden)
        if _has_no_effect(name, value=False):
            parser.add_argument(opposite, action=_Ignore, nargs=0, help=hidden)


def flag_notes(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Return flags of vLLM that are other ones here, or none, with a note on each.

    `parser` is that of `pagedray serve`.
    """
    notes: dict[str, str] = {}
    for action in parser._actions:
        if action.help != argparse.SUPPRESS and action.dest != "help":
            own, *others = action.option_strings or ("",)
            notes |= dict.fromkeys(others, f"the same as `{own}`")
    notes["--no-enable-prefix-caching"] = "the same as `--no-prefix-cache`"
    notes["--trust-remote-code"] = "rejected: code from a checkpoint is never run"
    ignored = {**IGNORED, **_SWITCHES_IGNORED, **_VALUES_IGNORED, **_OWN_SWITCHES}
    for name, reason in ignored.items():
        notes[_flag(name)] = f"no effect: {reason}"
    for name, reason in {**REJECTED, **_REJECTED}.items():
        if _has_no_effect(name, value=True):
            notes[_flag(name)] = f"no effect: {reason}"
            notes[_flag(f"no_{name}")] = f"rejected: {reason}"
        else:
            notes[_flag(name)] = f"rejected{_exceptions(name)}: {reason}"
    return sorted((flag, _with_flags(note, parser, mark="`")) for flag, note in notes.items())


def _with_flags(text: str, parser: argparse.ArgumentParser, *, mark: str = "") -> str:
    """Return a text with the names of options as the command line writes them."""

    def write(found: re.Match[str]) -> str:
        flag = _flag(found[0])
        action = parser._option_string_actions.get(flag)
        is_ours = action is not None and action.help != argparse.SUPPRESS
        return f"{mark}{flag}{mark}" if is_ours else found[0]

    return _OPTION.sub(write, text)


def _exceptions(name: str) -> str:
    """Return the values that are not rejected, if a user could write some."""
    values = {**WITHOUT_EFFECT, **_WITHOUT_EFFECT}.get(name, ())
    shown = [f"`{_text(value)}`" for value in values if value is not None and value is not False]
    return f", except for {' and '.join(shown)}" if shown else ""


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _has_no_effect(name: str, value: object) -> bool:
    # In Python, 1 equals True.
    if isinstance(value, bool):
        return any(one is value for one in {**WITHOUT_EFFECT, **_WITHOUT_EFFECT}.get(name, ()))
    return has_no_effect(name, value) or value in _WITHOUT_EFFECT.get(name, ())


def _flags(name: str) -> list[str]:
    return [_flag(name), *([_SHORT[name]] if name in _SHORT else [])]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# Any: argparse's own arguments, in both.
class _Ignore(argparse.Action):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "dest": argparse.SUPPRESS})

    def __call__(self, *_: Any) -> None:
        pass


class _Reject(argparse.Action):
    def __init__(self, *arguments: Any, reason: str, name: str | None, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "dest": argparse.SUPPRESS, "nargs": "?"})
        self._reason = reason
        self._name = name
        """The option whose values may have no effect, or None if each value is rejected."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, value: Any, option: str | None = None
    ) -> None:
        if self._name is None or value is None or not _has_no_effect(self._name, _value(value)):
            reason = _with_flags(self._reason, parser)
            parser.error(f"{option} is not supported: {reason}")


def _value(text: str) -> object:
    """Return what a word of the command line is in Python."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

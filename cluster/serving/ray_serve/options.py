"""The arguments of a Ray Serve application: what `serve run` and a Serve config file may say."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cluster.engine.options import EngineOptions
from cluster.serving.telemetry.log_lines import LogFormat
from cluster.serving.tools.tool_calls import ToolCallFormat
from pagedray.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServeArguments", "ServeOptions", "read_arguments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The knobs of a deployment beside those of its engines."""

    num_replicas: int = 1
    max_replicas: int | None = None
    """Lets the number of replicas grow to this with the load; `num_replicas` is the least."""
    target_kv_use: float = 0.7
    """The share of its KV blocks that a replica is to use when their number follows the load."""
    target_tokens: int | None = None
    """The tokens in flight that a replica is to have then; None goes by the KV blocks alone."""
    drain_timeout_s: float = 300.0
    """What running requests have to end when their replica is stopped."""
    api_keys: str | None = None
    """The file of API keys, as every node sees it; None asks nobody for a key."""
    stall_timeout_s: float = 120.0
    """A replica that has work and makes no step for so long is replaced."""
    lease_s: float = 30.0
    """A stream that nobody has read for so long ends; 5 s at least, so that one that is read is
    renewed in time by a process that is busy."""
    tool_call_format: ToolCallFormat | None = None
    """How the model writes tool calls; None is found in its chat template."""
    log_format: LogFormat = "text"
    """How a replica writes its log to standard error, which Ray keeps."""
    log_level: Literal["debug", "info", "warning"] = "info"
    otlp_endpoint: str | None = None
    """The OTLP collector that spans go to; None is what OpenTelemetry's own variables say."""

    def __post_init__(self) -> None:
        _check_at_least("num_replicas", self.num_replicas, 1)
        if self.max_replicas is not None:
            _check_at_least("max_replicas", self.max_replicas, self.num_replicas)
        if self.target_tokens is not None:
            _check_at_least("target_tokens", self.target_tokens, 1)
        if not 0.0 < self.target_kv_use <= 1.0:
            raise StartupError(
                f"target_kv_use must be above 0 and at most 1, not {self.target_kv_use}."
            )
        _check_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        _check_at_least("stall_timeout_s", self.stall_timeout_s, 1)
        _check_at_least("lease_s", self.lease_s, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """All arguments of an application."""

    model: str
    engine: EngineOptions
    serve: ServeOptions


_ENGINE_NAMES = frozenset(field.name for field in fields(EngineOptions))
_SERVE_NAMES = frozenset(field.name for field in fields(ServeOptions))


def read_arguments(given: Mapping[str, object]) -> ServeArguments:
    """Return the arguments by their names; a text may stand for a number, as in `serve run`.

    Raises StartupError with one line that names the argument at fault.
    """
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise StartupError(
            "model is required: the folder of the checkpoint, as every node sees it."
        )
    for name in given:
        if name != "model" and name not in _ENGINE_NAMES | _SERVE_NAMES:
            raise StartupError(f"There is no argument {name!r}; {_known_names()}")
    return ServeArguments(
        model=model,
        engine=_convert(given, EngineOptions, _ENGINE_NAMES),
        serve=_convert(given, ServeOptions, _SERVE_NAMES),
    )


# Any: one of two dataclasses comes in, and an object of it goes out.
def _convert(given: Mapping[str, object], kind: type[Any], names: frozenset[str]) -> Any:
    chosen = {name: value for name, value in given.items() if name in names}
    try:
        return msgspec.convert(chosen, kind, strict=False)
    except msgspec.ValidationError as error:
        # Such as: Expected `int | null`, got `str` - at `$.num_blocks`
        text, _, path = str(error).partition(" - at `$.")
        if not path:
            raise StartupError(f"{text}.") from None
        name = path.rstrip("`")
        raise StartupError(f"{name} is not allowed to be {chosen[name]!r}: {text}.") from None


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise StartupError(f"{name} must be at least {least}, not {value}.")


def _known_names() -> str:
    names = ", ".join(("model", *sorted(_ENGINE_NAMES | _SERVE_NAMES)))
    return f"known are {names}."

"""The arguments of the Ray Serve application, from `serve run` or a Serve config file."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

from cluster.engine.engine_options import EngineOptions
from cluster.engine.vllm_options import VLLM_NAMES, checked_options, own_options
from cluster.serving.reasoning import ReasoningFormat
from cluster.serving.telemetry.log_lines import LogFormat
from cluster.serving.tools.tool_calls import ToolCallFormat
from pagedray.errors import StartupError
from pagedray.text import nearest_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from starlette.types import Message, Send

__all__ = ["MESSAGES_PER_S", "MessagePace", "ServeArguments", "ServeOptions", "read_arguments"]

Options = TypeVar("Options", EngineOptions, "ServeOptions")

MESSAGES_PER_S = 800.0
"""Serve carries about a thousand messages a second from a replica, and more over HTTP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of a deployment besides the options of its engines."""

    num_replicas: int = 1
    max_replicas: int | None = None
    """Enables autoscaling from `num_replicas` to this number."""
    target_kv_use: float = 0.7
    """The fraction of KV blocks in use that autoscaling aims for in each replica."""
    target_tokens: int | None = None
    """The tokens in flight that autoscaling aims for in each replica; None uses KV blocks alone."""
    drain_timeout_s: float = 300.0
    """How long running requests may take to finish when their replica is stopped."""
    served_model_name: str | tuple[str, ...] | None = None
    """The model's name for clients, or several, of which answers have the first; None is the name
    of its folder, or its Hub id."""
    api_keys: str | None = None
    """Path of the API key file, on every node; None requires no key."""
    stall_timeout_s: float = 120.0
    """A replica that has work but runs no step for this long is replaced."""
    load_timeout_s: float | None = None
    """A replica that has not loaded after this long is replaced; None waits forever."""
    lease_s: float = 30.0
    """A stream that is not read for this long is cancelled; at least 5 s, so that busy callers
    renew in time."""
    continue_calls: bool = True
    """Whether calls of a dead or unresponsive replica continue on another replica."""
    tool_call_format: ToolCallFormat | None = None
    """The format of tool calls; None detects it from the chat template."""
    reasoning_format: ReasoningFormat | None = None
    """How reasoning is marked; None detects it from the chat template."""
    stored_responses: int = 1000
    """Responses of /v1/responses that each replica keeps of a tenant; 0 keeps none."""
    stored_responses_mib: int = 256
    """Memory for them in each replica, of which a tenant has a quarter; at least 32."""
    log_format: LogFormat = "text"
    """The format of a replica's log on standard error, which Ray stores."""
    log_level: Literal["debug", "info", "warning"] = "info"
    otlp_endpoint: str | None = None
    """The OTLP collector for spans; None uses OpenTelemetry's environment variables."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names in `served_model_name`."""
        names = self.served_model_name
        return (names,) if isinstance(names, str) else names or ()

    def __post_init__(self) -> None:
        _check_at_least("num_replicas", self.num_replicas, 1)
        if self.max_replicas is not None:
            _check_at_least("max_replicas", self.max_replicas, self.num_replicas)
        if self.target_tokens is not None:
            _check_at_least("target_tokens", self.target_tokens, 1)
        if not 0.0 < self.target_kv_use <= 1.0:
            raise StartupError(
                f"target_kv_use must be greater than 0 and at most 1, not {self.target_kv_use}."
            )
        _check_at_least("drain_timeout_s", self.drain_timeout_s, 0)
        _check_at_least("stall_timeout_s", self.stall_timeout_s, 1)
        if self.load_timeout_s is not None:
            _check_at_least("load_timeout_s", self.load_timeout_s, 1)
        _check_at_least("lease_s", self.lease_s, 5)
        _check_at_least("stored_responses", self.stored_responses, 0)
        _check_at_least("stored_responses_mib", self.stored_responses_mib, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArguments:
    """All arguments of an application."""

    model: str
    engine: EngineOptions
    serve: ServeOptions


_ENGINE_NAMES = frozenset(field.name for field in fields(EngineOptions))

_SERVE_NAMES = frozenset(field.name for field in fields(ServeOptions))


def read_arguments(given: Mapping[str, object]) -> ServeArguments:
    """Return the parsed arguments; strings may hold numbers, as in `serve run`.

    Raises StartupError that names the invalid argument.
    """
    model = given.get("model")
    if not isinstance(model, str) or not model:
        raise StartupError(
            "model is required: a Hub id, or the path of a checkpoint folder on every node."
        )
    serve = {name: value for name, value in given.items() if name in _SERVE_NAMES}
    engine = {name: value for name, value in given.items() if name not in {"model", *serve}}
    for name in engine:
        if name not in _ENGINE_NAMES | VLLM_NAMES:
            raise StartupError(f"Unknown argument {name!r}; {_hint(name)}")
    return ServeArguments(
        model=model,
        engine=_checked(own_options(engine), EngineOptions),
        serve=_checked(serve, ServeOptions),
    )


def _checked(given: Mapping[str, object], kind: type[Options]) -> Options:
    return checked_options(given, kind, what="argument", takes_text=True)


def _check_at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise StartupError(f"{name} must be at least {least}, not {value}.")


def _hint(name: str) -> str:
    """Return the likely meaning of an unknown argument, such as the flag --no-prefix-cache."""
    known = _ENGINE_NAMES | _SERVE_NAMES
    switch = name.replace("no_", "enable_", 1)
    if name.startswith("no_") and switch in known:
        return f"did you mean {switch} = false?"
    nearest = nearest_name(name, known)
    if nearest is not None:
        return f"did you mean {nearest}?"
    return f"known arguments are {', '.join(('model', *sorted(known)))}."


class MessagePace:
    """Shares a number of messages a second among the streams that have begun."""

    def __init__(self, messages_per_s: float) -> None:
        self._messages_per_s = messages_per_s
        self._num_streams = 0

    @contextmanager
    def stream(self) -> Iterator[PacedStream]:
        """Yield a stream, counted from its first message to the end of the block."""
        stream = PacedStream(self)
        try:
            yield stream
        finally:
            self._num_streams -= stream.has_begun

    def pause_s(self, stream: PacedStream) -> float:
        """Return how long a stream must wait after a message; a single stream hardly waits."""
        self._num_streams += not stream.has_begun
        stream.has_begun = True
        return self._num_streams / self._messages_per_s


class PacedStream:
    """A streamed response."""

    def __init__(self, pace: MessagePace) -> None:
        self._pace = pace
        self.has_begun = False
        """Whether it has sent a message."""

    async def pause(self) -> None:
        """Wait after a message; output that arrives meanwhile is merged into the next message."""
        await asyncio.sleep(self._pace.pause_s(self))

    def paced(self, send: Send) -> Send:
        """Return a `send` that waits after each part of a response but the last."""

        async def send_paced(message: Message) -> None:
            await send(message)
            if message.get("more_body", False):
                await self.pause()

        return send_paced

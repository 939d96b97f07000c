"""Inputs of calls, independent of any protocol: made by frontends, read by the servicer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from cluster.serving.continuation import Continuation
from cluster.serving.intake import IntakeLimits, ReaderLimits
from cluster.serving.reasoning import ReasoningFormat
from cluster.serving.text.template_arguments import ChatPrompt
from cluster.serving.tools.tool_calls import ToolCallFormat
from pagedray.batch import Pooling
from pagedray.errors import StartupError, UnknownModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagedray.config import EngineConfig
    from pagedray.model_config import ModelConfig

__all__ = [
    "MAX_CLIENT_ID_LENGTH",
    "MAX_SALT_LENGTH",
    "MAX_TIMEOUT_S",
    "Arrival",
    "CallOptions",
    "CallOrigin",
    "EmbeddingInput",
    "Frontend",
    "GenerationInput",
    "InfillPrompt",
    "Operation",
    "Prompt",
    "ScoreInput",
    "TokenizeInput",
    "check_model_name",
    "served_names",
    "with_served_names",
]

Frontend = Literal["http", "grpc", "ray", "none"]
"""The frontend that received a call."""
Operation = Literal["chat", "text_completion", "embeddings", "score"]
"""The operation of a call, by OpenTelemetry's name if there is one."""

_MAX_SHOWN = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrigin:
    """The frontend that received a call, and the client's trace that it is part of."""

    frontend: Frontend = "none"
    traceparent: str | None = None
    """The header of W3C Trace Context, as the client sent it."""
    tracestate: str | None = None


MAX_TIMEOUT_S = 86_400
"""The longest time that a client may give a call."""

MAX_CLIENT_ID_LENGTH = 128
"""Characters of a client's own id of a call."""

MAX_SALT_LENGTH = 1024
"""Characters of the salt of a prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The properties of a call that are known before its message is read."""

    operation: Operation
    tenant: str
    client_id: str | None = None
    """The client's own id of the call."""
    origin: CallOrigin = CallOrigin()


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """A text for the model to continue so that the suffix follows."""

    prefix: str
    suffix: str


Prompt = str | tuple[int, ...] | ChatPrompt | InfillPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """Prompts to continue, and how."""

    prompts: tuple[Prompt, ...]
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Fields of SamplingParams that the client set."""
    default_max_tokens: int | None = None
    """The maximum if the client sets none; None fills the context."""
    model: str | None = None
    """The model that the client named."""
    client_id: str | None = None
    """The client's own id of the call."""
    priority: int = 0
    deadline_s: float | None = None
    """When the call fails, on the monotonic clock; None if it has no deadline."""
    tenant: str = ""
    skips_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    includes_stop: bool = False
    """Whether the stop string or stop token that ends a sequence is part of its text."""
    adds_special_tokens: bool = True
    """Whether special tokens are added to texts; a chat template adds its own."""
    max_prompt_tokens: int | None = None
    """Number of tokens of a prompt that are kept; -1 is as many as fit."""
    truncates_end: bool = False
    """Whether tokens at the beginning of the prompt are kept, and not at its end."""
    cache_salt: str = ""
    """Prefixes are shared only by requests with the same salt."""
    prediction: str = ""
    """The text that the client expects, which only affects speed."""
    beam_length_penalty: float | None = None
    """The length penalty of a beam search for the `n` best completions; None samples completions.
    """
    is_resumable: bool = False
    """Whether the client may come back for the stream after its connection was cut."""
    origin: CallOrigin = CallOrigin()
    continuation: Continuation | None = None
    """Keeps the call the same if it continues in another replica."""

    @property
    def is_continued(self) -> bool:
        """Whether another replica has admitted the call and generated tokens."""
        return self.continuation is not None and bool(self.continuation.sequences)

    @property
    def arrival(self) -> Arrival:
        """The call's properties without its content."""
        is_chat = bool(self.prompts) and isinstance(self.prompts[0], ChatPrompt)
        return Arrival(
            operation="chat" if is_chat else "text_completion",
            tenant=self.tenant,
            client_id=self.client_id,
            origin=self.origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInput:
    """Texts, or their token ids, to embed."""

    prompts: tuple[str | tuple[int, ...], ...]
    param: str = "prompts"
    """The client's name for the texts."""
    pooling: Pooling | None = None
    """How hidden states are pooled; None selects the pooling of the checkpoint."""
    is_normalized: bool = True
    prompt_name: str | None = None
    """The prompt that is written before texts; None is the checkpoint's default."""
    dimensions: int | None = None
    """Length to which each vector is truncated; None keeps all of it."""
    max_prompt_tokens: int | None = None
    """Number of tokens of a text that are kept, with its special tokens; -1 is as many as fit."""
    truncates_end: bool = True
    """Whether tokens at the beginning of the text are kept, and not at its end."""
    model: str | None = None
    deadline_s: float | None = None
    """When the call fails, on the monotonic clock; None if it has no deadline."""
    tenant: str = ""
    origin: CallOrigin = CallOrigin()

    @property
    def arrival(self) -> Arrival:
        """The call's properties without its content."""
        return Arrival(operation="embeddings", tenant=self.tenant, origin=self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreInput:
    """Pairs of texts to score, such as a query and a document."""

    pairs: tuple[tuple[str, str], ...]
    params: tuple[str, str]
    """The client's names for the texts of a pair."""
    instruction: str | None = None
    """The criterion by which a reranker with a prompt judges; None is its default."""
    model: str | None = None
    deadline_s: float | None = None
    """When the call fails, on the monotonic clock; None if it has no deadline."""
    tenant: str = ""
    origin: CallOrigin = CallOrigin()

    @property
    def arrival(self) -> Arrival:
        """The call's properties without its content."""
        return Arrival(operation="score", tenant=self.tenant, origin=self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeInput:
    """A text or a conversation to tokenize."""

    prompt: str | ChatPrompt
    add_special_tokens: bool = True
    """Whether special tokens are added to a text; a chat template adds its own."""
    model: str | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """The options of a servicer."""

    tool_format: ToolCallFormat | None = None
    """How the model writes tool calls; None is detected in its chat template."""
    reasoning_format: ReasoningFormat | None = None
    """How the model marks its reasoning; None is detected in its chat template."""
    reader_limits: ReaderLimits = field(default_factory=ReaderLimits)
    intake_limits: IntakeLimits = field(default_factory=IntakeLimits)
    strict_parameters: bool = False
    """Whether parameters that would be ignored are rejected."""


def check_model_name(given: str | None, model: ModelConfig) -> None:
    """Raise UnknownModelError unless the name is a name of the model; None is accepted."""
    if given is not None and given != model.name and given not in model.other_names:
        raise UnknownModelError(given[:_MAX_SHOWN], *served_names(model))


def served_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names that clients may give; answers have the first."""
    return (model.name, *model.other_names)


def with_served_names(config: EngineConfig, names: Sequence[str]) -> EngineConfig:
    """Return a configuration with these names of the model, or its own without any.

    Raises StartupError for an empty name.
    """
    if not all(names):
        raise StartupError("served_model_name must not be empty.")
    if not names:
        return config
    first, *others = dict.fromkeys(names)
    return replace(config, model=replace(config.model, name=first, other_names=tuple(others)))

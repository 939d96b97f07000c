"""What clients ask for, in no protocol's words: the frontends write it, the servicer reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cluster.serving.text.chat_template import ChatMessage
from pagedray.batch import Pooling

__all__ = [
    "MAX_CLIENT_ID_LENGTH",
    "MAX_TIMEOUT_S",
    "Arrival",
    "CallOrigin",
    "ChatPrompt",
    "EmbeddingInput",
    "Frontend",
    "GenerationInput",
    "Operation",
    "Prompt",
    "TokenizeInput",
]

Frontend = Literal["http", "grpc", "ray", "none"]
"""Where a call came in."""

Operation = Literal["chat", "text_completion", "embeddings"]
"""What a call does, in OpenTelemetry's words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOrigin:
    """Where a call came in, and which trace of its client's it is part of."""

    frontend: Frontend = "none"
    traceparent: str | None = None
    """The header of W3C Trace Context, as the client sent it."""
    tracestate: str | None = None


MAX_TIMEOUT_S = 86_400
"""The longest time that a client may give a call."""
MAX_CLIENT_ID_LENGTH = 128
"""Characters of a client's own id of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What is known of a call before its message is read."""

    operation: Operation
    tenant: str
    client_id: str | None = None
    """The client's own id of the call."""
    origin: CallOrigin = CallOrigin()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the assistant is to go on with."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[Mapping[str, object], ...] = ()
    """Tools as the model's chat template takes them: `{"type": "function", "function": ...}`."""
    adds_generation_prompt: bool = True
    """Whether the text ends with what begins an assistant's turn."""
    continues_final_message: bool = False
    """Whether the last message is open: its text is gone on with, as its own role."""


Prompt = str | tuple[int, ...] | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationInput:
    """What is to be continued, and how."""

    prompts: tuple[Prompt, ...]
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Fields of SamplingParams that the client has set."""
    default_max_tokens: int | None = None
    """Tokens when the client sets no maximum; None is as many as the context has room for."""
    model: str | None = None
    """The model that the client named."""
    client_id: str | None = None
    """The client's own id of the call."""
    priority: int = 0
    deadline_s: float | None = None
    """On the monotonic clock."""
    tenant: str = ""
    skips_special_tokens: bool = True
    """Whether special tokens have no text."""
    includes_stop: bool = False
    """Whether a stop string or stop token that ends a continuation is part of its text."""
    origin: CallOrigin = CallOrigin()

    @property
    def arrival(self) -> Arrival:
        """What it is, whatever it asks for."""
        is_chat = bool(self.prompts) and isinstance(self.prompts[0], ChatPrompt)
        return Arrival(
            operation="chat" if is_chat else "text_completion",
            tenant=self.tenant,
            client_id=self.client_id,
            origin=self.origin,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInput:
    """Texts, or their token ids, that are to become vectors."""

    prompts: tuple[str | tuple[int, ...], ...]
    pooling: Pooling | None = None
    """None is what the model was made for."""
    is_normalized: bool = True
    dimensions: int | None = None
    """The first so many numbers of each vector; None is all of them."""
    model: str | None = None
    deadline_s: float | None = None
    """On the monotonic clock."""
    tenant: str = ""
    origin: CallOrigin = CallOrigin()

    @property
    def arrival(self) -> Arrival:
        """What it is, whatever it asks for."""
        return Arrival(operation="embeddings", tenant=self.tenant, origin=self.origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeInput:
    """A text or a conversation whose token ids are wanted."""

    prompt: str | ChatPrompt
    add_special_tokens: bool = True
    """Whether a text gets what the model wants around a prompt; a conversation has it anyway."""
    model: str | None = None
    tenant: str = ""

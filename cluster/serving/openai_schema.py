"""What OpenAI clients may send, and what it means in the validator's words.

A parameter that is not supported is refused unless it says what would happen anyway: null,
or the value that is its default.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, ValidationError

from cluster.serving.chat_template import ChatMessage
from cluster.serving.inputs import ChatPrompt, GenerationInput, Prompt
from cluster.serving.json_body import read_json
from pagedray.errors import InvalidRequestError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["ChatBody", "CompletionBody", "GenerationBody", "read_body"]

_COMPLETION_MAX_TOKENS = 16
_MAX_MESSAGES = 4096
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_SAMPLING_NAMES = (
    "n",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
)
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "one of {expected}",
}

_Defaults = Mapping[str, tuple[object, ...]]
_COMMON_DEFAULTS: dict[str, tuple[object, ...]] = {
    "best_of": (1,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "metadata": ({},),
    "safety_identifier": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "use_beam_search": (False,),
}


class _Part(BaseModel):
    """One piece of a parameter or body."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Part):
    """What a stream tells besides text."""

    include_usage: bool = False


class GenerationBody(_Part):
    """What both endpoints take."""

    defaults: ClassVar[_Defaults] = {}
    """Unsupported parameters and the values that ask for nothing."""

    model: str
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    # Lists and maps are checked by the validator, which counts before it looks inside.
    stop: Any = None
    stop_token_ids: Any = None
    logit_bias: Any = None
    priority: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Taken and not used: it names the end user to whoever runs the service."""

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with what the call used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None reports nothing."""

    @abstractmethod
    def to_input(self, client_id: str | None) -> GenerationInput:
        """Return what is asked for. Raises InvalidRequestError."""

    def check(self) -> None:
        """Raise InvalidRequestError if parameters contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream = true.", param="stream_options")

    def sampling(self) -> dict[str, object]:
        """Return the fields of SamplingParams that are set."""
        given: dict[str, object] = {
            name: value for name in _SAMPLING_NAMES if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = _stop_of(self.stop)
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = _tuple_of(self.stop_token_ids, "stop_token_ids")
        if self.logit_bias is not None:
            given["logit_bias"] = _bias_of(self.logit_bias)
        return given


class CompletionBody(GenerationBody):
    """The body of POST /v1/completions."""

    defaults: ClassVar[_Defaults] = _COMMON_DEFAULTS | {"echo": (False,), "suffix": ("",)}

    prompt: Any
    logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None reports nothing."""
        return self.logprobs

    def to_input(self, client_id: str | None) -> GenerationInput:
        """Return what is asked for. Raises InvalidRequestError."""
        given = self.sampling()
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        return GenerationInput(
            prompts=_prompts_of(self.prompt),
            sampling=given,
            default_max_tokens=_COMPLETION_MAX_TOKENS,
            model=self.model,
            client_id=client_id,
            priority=self.priority,
        )


class _TextPart(_Part):
    type: Literal["text"]
    text: str


class _Message(_Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Any

    def to_message(self, position: int) -> ChatMessage:
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, _content_of(self.content, f"messages.{position}.content"))


class ChatBody(GenerationBody):
    """The body of POST /v1/chat/completions."""

    defaults: ClassVar[_Defaults] = _COMMON_DEFAULTS | {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "parallel_tool_calls": (True,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("none",),
        "tools": ([],),
    }

    messages: Annotated[list[_Message], FailFast()]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report for each token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raise InvalidRequestError if parameters contradict each other."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs = true.", param="top_logprobs")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise InvalidRequestError(
                "max_tokens and max_completion_tokens contradict each other.", param="max_tokens"
            )

    def to_input(self, client_id: str | None) -> GenerationInput:
        """Return what is asked for. Raises InvalidRequestError."""
        given = self.sampling()
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        if self.num_logprobs is not None:
            given["logprobs"] = self.num_logprobs
        messages = tuple(
            message.to_message(position) for position, message in enumerate(self.messages)
        )
        return GenerationInput(
            prompts=(ChatPrompt(messages),),
            sampling=given,
            model=self.model,
            client_id=client_id,
            priority=self.priority,
        )


Body = TypeVar("Body", bound=GenerationBody)


def read_body(kind: type[Body], raw: bytes) -> Body:
    """Return the checked body of a call. Raises InvalidRequestError."""
    supported = _without_defaults(read_json(raw), kind)
    try:
        body = kind.model_validate(supported)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=True)[0]) from error
    body.check()
    return body


def _without_defaults(given: dict[str, object], kind: type[GenerationBody]) -> dict[str, object]:
    kept: dict[str, object] = {}
    messages = given.get("messages")
    if isinstance(messages, list) and len(messages) > _MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages may have {_MAX_MESSAGES} entries, not {len(messages)}.", param="messages"
        )
    for name, value in given.items():
        if value is None:
            continue
        if name in kind.model_fields:
            kept[name] = _without_nulls(value) if name in _NESTED else value
        elif not _is_one_of(value, kind.defaults.get(name, ())):
            raise _unsupported(name)
    return kept


_NESTED = frozenset(("messages", "stream_options"))


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: inner for name, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_nulls(inner) for inner in value]
    return value


def _is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    # True equals 1 to Python but not to a client.
    return any(value == other and type(value) is type(other) for other in allowed)


def _refusal(details: ErrorDetails) -> InvalidRequestError:
    where = ".".join(str(part) for part in details["loc"])
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unsupported(where)
    if kind == "missing":
        return InvalidRequestError(f"{where} is required.", param=where)
    expected = _EXPECTED.get(kind, "a valid value").format(**details.get("ctx", {}))
    return InvalidRequestError(
        f"{where} must be {expected}, not {_shown(details['input'])}.", param=where
    )


def _unsupported(name: str) -> InvalidRequestError:
    is_plain = _PLAIN_NAME.fullmatch(name) is not None
    shown = name if is_plain else _shown(name)
    return InvalidRequestError(f"{shown} is not supported.", param=name if is_plain else None)


def _shown(value: object) -> str:
    # Only the start of a large value is written out.
    text = repr(value[:40] if isinstance(value, str | list) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _prompts_of(given: object) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list):
        if all(type(entry) is int for entry in given):
            return (tuple(given),)
        if all(isinstance(entry, str) for entry in given):
            return tuple(given)
        if all(isinstance(entry, list) for entry in given) and all(
            type(token_id) is int for entry in given for token_id in entry
        ):
            return tuple(tuple(entry) for entry in given)
    raise InvalidRequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists.",
        param="prompt",
    )


def _content_of(given: object, where: str) -> str:
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        try:
            return "".join(_TextPart.model_validate(part).text for part in given)
        except ValidationError:
            pass
    raise InvalidRequestError(f"{where} must be a string or a list of text parts.", param=where)


def _stop_of(given: object) -> object:
    if isinstance(given, str):
        return (given,)
    return tuple(given) if isinstance(given, list) else given


def _tuple_of(given: object, name: str) -> tuple[object, ...]:
    if not isinstance(given, list):
        raise InvalidRequestError(f"{name} must be a list of integers.", param=name)
    return tuple(given)


def _bias_of(given: object) -> dict[object, object]:
    if not isinstance(given, dict):
        raise InvalidRequestError(
            "logit_bias must be an object of token ids and numbers.", param="logit_bias"
        )
    return {int(name) if _INTEGER.fullmatch(name) else name: value for name, value in given.items()}

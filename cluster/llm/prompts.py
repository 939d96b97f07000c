"""Makes requests from the prompts and parameters of the Python API."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import random
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import msgspec

from cluster.llm.sampling_params import SamplingParams, engine_fields
from cluster.serving.inputs import GenerationInput, Prompt
from cluster.serving.json_body import read_part
from cluster.serving.openai.bodies.chat_body import check_open_end
from cluster.serving.openai.bodies.messages import Message, read_messages, read_tools
from cluster.serving.text.template_arguments import ChatPrompt, check_variable_names
from cluster.serving.validator import Validator
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.field_checks import check_bool
from pagedray.sampling_params import SamplingParams as EngineSamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from cluster.serving.embedding_validator import EmbeddingValidator, ScoreValidator
    from cluster.serving.text.template_arguments import ChatMessage
    from pagedray.config import EngineConfig
    from pagedray.request import Request

__all__ = [
    "Conversation",
    "GivenPrompt",
    "RequestMaker",
    "SaltedPrompt",
    "SampledPrompt",
    "check_params",
    "read_conversations",
    "read_prompts",
    "read_stream_prompt",
    "read_texts",
    "run_apart",
]

GivenPrompt: TypeAlias = str | Sequence[int] | Mapping[str, object]
"""A text, its token ids, or a dictionary with `prompt` or `prompt_token_ids`."""
Conversation: TypeAlias = Sequence[Mapping[str, object]]
"""Messages with `role` and `content`."""
_NAMES = ("prompt", "prompt_token_ids", "cache_salt")
_CHAT_NAMES = frozenset(("add_generation_prompt", "continue_final_message", "messages", "tools"))
"""Variables of chat templates that other parameters set."""

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class SaltedPrompt:
    """A prompt with prefixes that are shared only with prompts of the same salt."""

    value: Prompt
    salt: str = ""


def read_prompts(
    given: GivenPrompt | Sequence[GivenPrompt], param: str = "prompts"
) -> list[SaltedPrompt]:
    """Return the prompts of a call, or its only prompt. Raises InvalidRequestError."""
    if isinstance(given, str | Mapping):
        return [_read_prompt(given, param)]
    items = _items_of(given, param)
    if items and _is_number(items[0]):
        return [_read_prompt(items, param)]
    return [_read_prompt(one, param) for one in items]


def read_conversations(
    given: Conversation | Sequence[Conversation],
    *,
    tools: Sequence[Mapping[str, object]] | None,
    adds_generation_prompt: bool | None,
    continues_final_message: bool,
    variables: Mapping[str, object] | None,
    template: str | None,
) -> list[SaltedPrompt]:
    """Return the conversations of a call, or its only conversation. Raises InvalidRequestError."""
    for name, value, kind, noun in (
        ("tools", tools, Iterable, "list"),
        ("chat_template_kwargs", variables, Mapping, "dictionary"),
        ("chat_template", template, str, "string"),
    ):
        if value is not None and not isinstance(value, kind):
            raise invalid_field(name, f"must be a {noun}.")
    check_bool("continue_final_message", continues_final_message)
    if adds_generation_prompt is not None:
        check_bool("add_generation_prompt", adds_generation_prompt)
    check_variable_names(variables or {}, "chat_template_kwargs", _CHAT_NAMES)
    check_open_end(bool(adds_generation_prompt), continues_final_message)
    if adds_generation_prompt is None:
        adds_generation_prompt = not continues_final_message
    items = _entries_of(given)
    conversations = [items] if not items or isinstance(items[0], Mapping) else items
    written = tuple(
        tool.for_template() for tool in read_tools(None if tools is None else _objects(tools))
    )
    return [
        SaltedPrompt(
            ChatPrompt(
                _messages(cast("Conversation", conversation)),
                written,
                adds_generation_prompt,
                continues_final_message,
                dict(variables or {}),
                template,
                is_template_trusted=True,
            )
        )
        for conversation in conversations
    ]


def read_stream_prompt(given: GivenPrompt | Conversation) -> SaltedPrompt:
    """Return a prompt, or a conversation. Raises InvalidRequestError."""
    if not isinstance(given, str | Mapping):
        items = _items_of(given, "prompt")
        if items and isinstance(items[0], Mapping):
            return SaltedPrompt(ChatPrompt(_messages(cast("Conversation", items))))
        return _read_prompt(items, "prompt")
    return _read_prompt(given, "prompt")


def read_texts(given: str | Iterable[str], param: str) -> list[str]:
    """Return the texts of a call, or its only text. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        texts = list(given)
        if all(isinstance(text, str) for text in texts):
            return texts
    raise invalid_field(param, "must be a string or a list of strings.")


def _is_number(given: object) -> bool:
    """Return whether a value may be a token id, also as an integer of another library."""
    return hasattr(given, "__index__") and not getattr(given, "ndim", 0)


def _read_prompt(given: GivenPrompt, param: str) -> SaltedPrompt:
    if isinstance(given, str):
        return SaltedPrompt(given)
    if isinstance(given, Mapping):
        return _read_dictionary(given)
    return SaltedPrompt(_token_ids(given, param))


def _read_dictionary(given: Mapping[str, object]) -> SaltedPrompt:
    present = {name: value for name, value in given.items() if value is not None}
    for name in present:
        if name not in _NAMES:
            raise InvalidRequestError(
                f"{name!r:.80} is not supported in a prompt, which may have {', '.join(_NAMES)}.",
                param=str(name)[:80],
            )
    salt, token_ids = present.get("cache_salt", ""), present.get("prompt_token_ids")
    if not isinstance(salt, str):
        raise invalid_field("cache_salt", "must be a string.")
    if token_ids is not None:
        return SaltedPrompt(_token_ids(token_ids, "prompt_token_ids"), salt)
    text = present.get("prompt")
    if not isinstance(text, str):
        raise InvalidRequestError(
            "A prompt must have a string as prompt, or prompt_token_ids.", param="prompt"
        )
    return SaltedPrompt(text, salt)


def _token_ids(given: object, param: str) -> tuple[int, ...]:
    items = given if isinstance(given, list | tuple) else _items_of(given, param)
    # Several times as fast as the code below, which matters for long prompts. Its errors are
    # ValueErrors, such as that for a lone surrogate in a text.
    with contextlib.suppress(ValueError):
        return msgspec.convert(items, tuple[int, ...])
    if not any(isinstance(one, bool) for one in items):
        try:
            # Lists may hold integers of other libraries.
            return tuple(map(operator.index, items))
        except TypeError:
            pass
    raise _no_prompt(param)


def _items_of(given: object, param: str) -> list[Any]:  # Any: as the caller says
    """Return the entries of anything but bytes, which are no token ids, and sets without order."""
    others = bytes, bytearray, memoryview, set, frozenset
    if isinstance(given, Iterable) and not isinstance(given, others):
        # Any: the elements of another library's array.
        to_list: Callable[[], Any] | None = getattr(given, "tolist", None)
        items = list(given) if to_list is None else to_list()
        # An array without a dimension has none.
        if isinstance(items, list):
            return items
    raise _no_prompt(param)


def _no_prompt(param: str) -> InvalidRequestError:
    return invalid_field(param, "must be texts or lists of token ids.")


def _messages(given: Conversation) -> tuple[ChatMessage, ...]:
    messages = [
        read_part(Message, one, f"messages.{index}")
        for index, one in enumerate(_objects(_entries_of(given)))
    ]
    return read_messages(messages)


def _objects(entries: Iterable[object]) -> list[object]:
    """Return entries with each mapping as the object of JSON that it would be."""
    return [
        {str(name): value for name, value in one.items()} if isinstance(one, Mapping) else one
        for one in entries
    ]


def _entries_of(given: object) -> list[Any]:  # Any: messages, or conversations
    if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping):
        return list(given)
    raise invalid_field(
        "messages", "must be a list of dictionaries with role and content, or a list of such lists."
    )


def check_params(given: object, kind: type[object], name: str) -> None:
    """Check that a parameter of a call is a `kind`. Raises InvalidRequestError."""
    if not isinstance(given, kind):
        raise invalid_field(name, f"must be {kind.__name__}, not {type(given).__name__}.")


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A prompt and how its completions are sampled."""

    prompt: SaltedPrompt
    params: EngineSamplingParams
    seed: int | None
    """The seed of `params`, or else the next one of the model; None is random."""


class RequestMaker:
    """Makes requests of prompts, with a seed each if the model was given a seed."""

    def __init__(
        self, validator: Validator | EmbeddingValidator | ScoreValidator, config: EngineConfig
    ) -> None:
        # Any: values of several fields.
        self.recommended: Mapping[str, Any] = dict(config.sampling_defaults)
        """The fields of parameters that the model's file sets."""
        self.default_params = SamplingParams(**self.recommended)
        """The default parameters of requests, which the model's file recommends."""
        self._validator = validator
        self._seeds = None if config.seed is None else random.Random(config.seed)

    def text_validator(self) -> Validator:
        """Return the validator. Raises InvalidRequestError if the model does not generate text."""
        if not isinstance(self._validator, Validator):
            raise InvalidRequestError("The model does not generate text; use embed() or score().")
        return self._validator

    # Any: the caller's value.
    def sample(self, prompts: Sequence[SaltedPrompt], params: Any) -> list[SampledPrompt]:
        """Return the prompts of a call with their parameters. Raises InvalidRequestError."""
        seeds = self._seeds
        return [
            SampledPrompt(
                prompt,
                one,
                seeds.randrange(2**63) if seeds is not None and one.seed is None else one.seed,
            )
            for prompt, one in zip(prompts, self._params_of(params, len(prompts)), strict=True)
        ]

    # Any: the caller's value.
    def _params_of(self, given: Any, num_prompts: int) -> Sequence[EngineSamplingParams]:
        """Return the parameters of each prompt. Raises InvalidRequestError."""
        if given is None or isinstance(given, EngineSamplingParams):
            return [given or self.default_params] * num_prompts
        params = given if isinstance(given, Sequence) else [given]
        for one in params:
            check_params(one, EngineSamplingParams, "sampling_params")
        if len(params) != num_prompts:
            raise invalid_field(
                "sampling_params",
                f"must have one entry per prompt, {num_prompts}, not {len(params)}.",
            )
        return params

    async def make(self, prompts: Sequence[SampledPrompt]) -> list[Request]:
        """Return a request for each prompt. Raises InvalidRequestError."""
        validator = self.text_validator()
        requests: list[Request] = []
        for one in prompts:
            given = GenerationInput(
                prompts=(one.prompt.value,),
                sampling=engine_fields(one.params) | {"seed": one.seed},
                cache_salt=one.prompt.salt,
            )
            requests += await validator.validate(given)
        return requests


def run_apart(work: Coroutine[None, None, Result]) -> Result:
    """Return the result of a coroutine, which runs in a new thread.

    The caller's thread may have a running event loop, as in a notebook.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()

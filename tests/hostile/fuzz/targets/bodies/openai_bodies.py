"""Bodies of the OpenAI endpoints, up to the input of the engine."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.anthropic.conversation_body import ModelSupport
from cluster.serving.anthropic.messages_body import CountBody, MessagesBody
from cluster.serving.json_body import Body, read_body
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.embedding_body import EmbeddingBody
from cluster.serving.openai.bodies.score_body import RerankBody, ScoreBody
from cluster.serving.responses.items import FunctionTools
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from tests.hostile.fuzz.target import Target
from tests.load.request_bodies import json_bodies

if TYPE_CHECKING:
    from collections.abc import Callable

    from cluster.serving.inputs import GenerationInput

AnyBody = TypeVar("AnyBody", bound=Body)

_VARIABLES = frozenset(("enable_thinking", "documents"))
_SUPPORT = ModelSupport(
    known_variables=frozenset(), keeps_system_messages=lambda: False, can_limit_reasoning=True
)


def _read_completion(raw: bytes) -> None:
    _check(_read(CompletionBody, raw).to_input("a"))


def _read_chat(raw: bytes) -> None:
    body = _read(ChatBody, raw)
    tools = body.tool_use("hermes")
    given = body.to_input("a", tools, known_variables=_VARIABLES, note_ignored=_ignore)
    _check(given)


def _read_texts_to_tokenize(raw: bytes) -> None:
    body = _read(TokenizeBody, raw)
    body.to_input(known_variables=lambda _: _VARIABLES, note_ignored=_ignore)


def _read_messages(raw: bytes) -> None:
    body = _read(MessagesBody, raw)
    tools = body.tool_use("hermes")
    _check(body.to_input("a", tools, _SUPPORT, note_ignored=_ignore))


def _read_response(raw: bytes) -> None:
    body = _read(ResponsesBody, raw)
    tools = body.tool_use(FunctionTools(), "hermes")
    given = body.to_input("a", tools, known_variables=frozenset(), note_ignored=_ignore)
    _check(given)


def _read_messages_to_count(raw: bytes) -> None:
    body = _read(CountBody, raw)
    tools = body.tool_use("hermes")
    body.to_input(tools, _SUPPORT, note_ignored=_ignore)


def _read_input_to_count(raw: bytes) -> None:
    body = _read(InputTokensBody, raw)
    tools = body.tool_use(FunctionTools(), "hermes")
    body.to_input(tools, known_variables=frozenset(), note_ignored=_ignore)


_READERS: dict[str, Callable[[bytes], object]] = {
    "/v1/completions": _read_completion,
    "/v1/chat/completions": _read_chat,
    "/v1/embeddings": lambda raw: _read(EmbeddingBody, raw).to_input(),
    "/tokenize": _read_texts_to_tokenize,
    "/detokenize": lambda raw: _read(DetokenizeBody, raw).token_ids(),
    "/rerank": lambda raw: _read(RerankBody, raw).to_input(),
    "/score": lambda raw: _read(ScoreBody, raw).to_input(),
    "/v1/messages": _read_messages,
    "/v1/responses": _read_response,
    "/v1/messages/count_tokens": _read_messages_to_count,
    "/v1/responses/input_tokens": _read_input_to_count,
}
_PATHS = list(_READERS)


def run(data: bytes) -> None:
    """Read a body for the endpoint that the first byte selects, or raise nothing but rejections."""
    if not data:
        return
    path = _PATHS[data[0] % len(_PATHS)]
    with suppress(InvalidRequestError):
        _READERS[path](data[1:])


def _read(kind: type[AnyBody], raw: bytes) -> AnyBody:
    return read_body(kind, raw, note_ignored=_ignore)


def _ignore(name: str) -> None:
    pass


def _check(given: GenerationInput) -> None:
    """Raise InvalidRequestError for a value of a parameter, as the validator does."""
    SamplingParams(**{"max_tokens": 1, **given.sampling})  # type: ignore[arg-type]  # checked there


def _seed(path: str, body: object) -> bytes:
    """Return what `run` reads as a body for this endpoint."""
    return bytes([_PATHS.index(path)]) + json.dumps(body).encode()


def _message_seeds() -> tuple[bytes, ...]:
    """Return bodies of Anthropic's endpoints."""
    call = {"type": "tool_use", "id": "c", "name": "look", "input": {"a": None}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "1", "is_error": True}
    thought = {"type": "thinking", "thinking": "t", "signature": "s"}
    counted = {
        "model": "m",
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "y"}]},
        ],
        "tools": [{"name": "look", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low"},
    }
    whole = {**counted, "max_tokens": 2, "stop_sequences": ["zz"], "top_k": 3, "stream": True}
    return _seed("/v1/messages", whole), _seed("/v1/messages/count_tokens", counted)


def _response_seeds() -> tuple[bytes, ...]:
    """Return bodies of OpenAI's Responses API."""
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}]}
    part = {"type": "output_text", "text": "x", "annotations": []}
    said = {"role": "assistant", "content": [part]}
    body = {
        "model": "m",
        "instructions": "x",
        "input": [{"role": "user", "content": "x"}, thought, said, call, output],
        "tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
        "tool_choice": {"type": "function", "name": "look"},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": "low"},
        "max_output_tokens": 2,
        "stream": True,
    }
    return (_seed("/v1/responses", body),)


def _search_seeds() -> tuple[bytes, ...]:
    """Return bodies that search beams, and that keep their prefixes apart."""
    common = {
        "model": "m",
        "use_beam_search": True,
        "n": 2,
        "length_penalty": 0.8,
        "temperature": 0,
        "cache_salt": "s",
    }
    messages = [{"role": "user", "content": "x"}]
    return (
        _seed("/v1/completions", {**common, "prompt": ["a", "b"]}),
        _seed("/v1/chat/completions", {**common, "messages": messages}),
    )


def _seeds() -> tuple[bytes, ...]:
    return (
        _message_seeds()
        + _response_seeds()
        + _search_seeds()
        + tuple(
            _seed(kind.partition(" ")[0], body)
            for kind, bodies in json_bodies("m").items()
            for body in bodies
        )
    )


TARGET = Target(run=run, seeds=_seeds())

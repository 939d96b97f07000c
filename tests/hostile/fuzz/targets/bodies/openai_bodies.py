"""Bodies of the OpenAI endpoints, up to the input of the engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TypeVar

from cluster.serving.admin.tokenize_body import DetokenizeBody, TokenizeBody
from cluster.serving.anthropic.count_body import CountBody
from cluster.serving.anthropic.messages_body import MessagesBody
from cluster.serving.anthropic.model_support import ModelSupport
from cluster.serving.intake.steps import finish
from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.embedding_body import EmbeddingBody
from cluster.serving.openai.bodies.score_body import RerankBody, ScoreBody
from cluster.serving.responses.function_tools import FunctionTools
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from cluster.serving.schema.body import Body
from cluster.serving.schema.body_reader import read_body
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from tests.hostile.fuzz.target import Target
from tests.load.request_bodies import json_bodies

if TYPE_CHECKING:
    from cluster.serving.inputs import GenerationInput

AnyBody = TypeVar("AnyBody", bound=Body)

_SUPPORT = ModelSupport(
    known_variables=frozenset(), keeps_system_messages=lambda: False, can_limit_reasoning=True
)


def run(data: bytes) -> None:
    """Return an input or an InvalidRequestError, for an endpoint that the first byte selects."""
    if not data:
        return
    kind, raw = data[0] % 11, data[1:]
    try:
        if kind == 0:
            _check(_read(CompletionBody, raw).to_input("a"))
        elif kind == 1:
            body = _read(ChatBody, raw)
            _check(
                finish(
                    body.to_input(
                        "a",
                        finish(body.tool_use("hermes")),
                        known_variables=frozenset(("enable_thinking", "documents")),
                        note_ignored=_ignore,
                    )
                )
            )
        elif kind == 2:
            finish(_read(EmbeddingBody, raw).to_input())
        elif kind == 3:
            tokenized = _read(TokenizeBody, raw)
            finish(
                tokenized.to_input(
                    known_variables=lambda _: frozenset(("enable_thinking", "documents")),
                    note_ignored=_ignore,
                )
            )
        elif kind == 4:
            _read(DetokenizeBody, raw).token_ids()
        elif kind == 5:
            finish(_read(RerankBody, raw).to_input())
        elif kind == 6:
            finish(_read(ScoreBody, raw).to_input())
        elif kind == 7:
            message = _read(MessagesBody, raw)
            tools = finish(message.tool_use("hermes"))
            given = message.to_input("a", tools, _SUPPORT, note_ignored=_ignore)
            _check(finish(given))
        elif kind == 8:
            response = _read(ResponsesBody, raw)
            tools = finish(response.tool_use(FunctionTools(), "hermes"))
            asked = response.to_input("a", tools, known_variables=frozenset(), note_ignored=_ignore)
            _check(finish(asked))
        elif kind == 9:
            counted = _read(CountBody, raw)
            tools = finish(counted.tool_use("hermes"))
            finish(counted.to_input(tools, _SUPPORT, note_ignored=_ignore))
        else:
            prompt = _read(InputTokensBody, raw)
            tools = finish(prompt.tool_use(FunctionTools(), "hermes"))
            finish(prompt.to_input(tools, known_variables=frozenset(), note_ignored=_ignore))
    except InvalidRequestError:
        return


def _read(kind: type[AnyBody], raw: bytes) -> AnyBody:
    return finish(read_body(kind, raw, note_ignored=_ignore))


def _ignore(name: str) -> None:
    pass


def _check(given: GenerationInput) -> None:
    """Raise InvalidRequestError for a value of a parameter, as the validator does."""
    SamplingParams(**{"max_tokens": 1, **given.sampling})  # type: ignore[arg-type]  # checked there


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
    return b"\x07" + json.dumps(whole).encode(), b"\x09" + json.dumps(counted).encode()


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
    return (b"\x08" + json.dumps(body).encode(),)


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
        b"\x00" + json.dumps({**common, "prompt": ["a", "b"]}).encode(),
        b"\x01" + json.dumps({**common, "messages": messages}).encode(),
    )


def _seeds() -> tuple[bytes, ...]:
    numbers = {
        "/v1/completions": 0,
        "/v1/chat/completions": 1,
        "/v1/embeddings": 2,
        "/tokenize": 3,
        "/detokenize": 4,
        "/rerank": 5,
        "/score": 6,
        "/v1/messages": 7,
        "/v1/responses": 8,
        "/v1/messages/count_tokens": 9,
        "/v1/responses/input_tokens": 10,
    }
    return (
        _message_seeds()
        + _response_seeds()
        + _search_seeds()
        + tuple(
            bytes([numbers[kind.partition(" ")[0]]]) + json.dumps(body).encode()
            for kind, bodies in json_bodies("m").items()
            for body in bodies
        )
    )


TARGET = Target(run=run, seeds=_seeds())

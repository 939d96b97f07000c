"""The parameters that OpenAI's client library has types for: each is read, ignored or rejected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from openai.types import (
    chat,
    completion_create_params,
    embedding_create_params,
    responses,
    shared_params,
)
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params, response_input_item_param

from cluster.serving.openai.bodies.chat_body import ChatBody
from cluster.serving.openai.bodies.completion_body import CompletionBody
from cluster.serving.openai.bodies.embedding_body import EmbeddingBody
from cluster.serving.openai.bodies.generation_body import StreamOptions
from cluster.serving.openai.bodies.messages import Message, MessageCall, RefusalPart, TextPart
from cluster.serving.openai.bodies.tool_fields import Function, ToolObject
from cluster.serving.responses.input_body import Reasoning, TextConfig, TextFormat
from cluster.serving.responses.items import ITEMS, FunctionTool, NamespaceTool
from cluster.serving.responses.responses_body import InputTokensBody, ResponsesBody
from cluster.serving.schema.body import Body, OpenPart

if TYPE_CHECKING:
    from cluster.serving.schema.body import BodyPart

# fmt: off
TYPES: list[tuple[type, type[BodyPart]]] = [
    (chat_params.CompletionCreateParamsBase, ChatBody),
    (chat_params.CompletionCreateParamsStreaming, ChatBody),
    (completion_create_params.CompletionCreateParamsBase, CompletionBody),
    (embedding_create_params.EmbeddingCreateParams, EmbeddingBody),
    (response_create_params.ResponseCreateParamsBase, ResponsesBody),
    (responses.input_token_count_params.InputTokenCountParams, InputTokensBody),
    *((kind, Message) for kind in (
        chat.ChatCompletionSystemMessageParam, chat.ChatCompletionDeveloperMessageParam,
        chat.ChatCompletionUserMessageParam, chat.ChatCompletionAssistantMessageParam,
        chat.ChatCompletionToolMessageParam, chat.ChatCompletionFunctionMessageParam)),
    (chat.ChatCompletionContentPartTextParam, TextPart),
    (chat.ChatCompletionContentPartRefusalParam, RefusalPart),
    (chat.ChatCompletionMessageFunctionToolCallParam, MessageCall),
    (chat.ChatCompletionFunctionToolParam, ToolObject),
    (chat.ChatCompletionStreamOptionsParam, StreamOptions),
    (shared_params.FunctionDefinition, Function),
    (shared_params.Reasoning, Reasoning),
    (responses.EasyInputMessageParam, ITEMS["message"]),
    (responses.ResponseOutputMessageParam, ITEMS["message"]),
    (responses.ResponseFunctionToolCallParam, ITEMS["function_call"]),
    (response_input_item_param.FunctionCallOutput, ITEMS["function_call_output"]),
    (responses.ResponseReasoningItemParam, ITEMS["reasoning"]),
    (responses.ResponseInputTextParam, TextPart),
    (responses.ResponseOutputTextParam, TextPart),
    (responses.ResponseOutputRefusalParam, RefusalPart),
    (responses.FunctionToolParam, FunctionTool),
    (responses.NamespaceToolParam, NamespaceTool),
    (responses.ResponseTextConfigParam, TextConfig),
    (responses.ResponseFormatTextJSONSchemaConfigParam, TextFormat),
]
# fmt: on
HINTS = {
    *("annotations", "caller", "encrypted_content", "id", "logprobs", "output_schema", "phase"),
    *("prompt_cache_breakpoint", "status", "summary"),
}
"""Fields of messages and tools that change no answer."""


@pytest.mark.parametrize(("kind", "part"), TYPES)
def test_parameters_of_the_client_are_known(kind: type, part: type[BodyPart]) -> None:
    # Typed dictionaries know these names at run time only.
    names = {*kind.__required_keys__, *kind.__optional_keys__}  # type: ignore[attr-defined]
    known = {field.alias or name for name, field in part.model_fields.items()}
    if issubclass(part, Body):
        known = known.union(part.ignored, part.rejected, part.defaults)
    if issubclass(part, OpenPart):
        known = known.union(part.rejected, HINTS)
    assert names <= known

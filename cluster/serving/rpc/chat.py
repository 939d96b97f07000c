"""Translates conversations between protobuf messages and the servicer's inputs and outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Self

from cluster.serving.intake import check_num_messages
from cluster.serving.json_body import check_counts, read_arguments, read_json
from cluster.serving.rpc.requests import generation_input, tokenize_input
from cluster.serving.rpc.responses import finish_reason, logprobs_of, stop_reason, write_frame
from cluster.serving.text.template_arguments import (
    MAX_DOCUMENTS,
    ChatMessage,
    ChatPrompt,
    MessageToolCall,
    TemplateArguments,
)
from cluster.serving.tools.tool import MAX_TOOLS, Tool
from cluster.serving.tools.tool_choice import ToolChoice, ToolUse, check_tools
from cluster.serving.tools.turn_reader import TurnDelta
from cluster.serving.tools.turns import Turns
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.field_checks import check_size
from pagedray.request import FinishReason
from pagedray.sampling_params import Structure
from pagedray.v1 import pagedray_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from cluster.serving.auth import Tenant
    from cluster.serving.generation_call import GenerationOutput
    from cluster.serving.inputs import GenerationInput, TokenizeInput
    from cluster.serving.intake import RequestSize
    from cluster.serving.rpc.call import RpcCall
    from cluster.serving.text.text_stream import SequenceOutput, TokenBytes
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from cluster.serving.tools.turn_reader import ToolCallDelta
    from cluster.serving.tools.turns import Turn
    from pagedray.request import Reasoning

__all__ = ["Chat", "read_tokenize"]

_ROLES = {
    pb.CHAT_ROLE_SYSTEM: "system",
    pb.CHAT_ROLE_USER: "user",
    pb.CHAT_ROLE_ASSISTANT: "assistant",
    pb.CHAT_ROLE_TOOL: "tool",
}
_MODES: dict[int, ToolChoice] = {
    pb.TOOL_CHOICE_MODE_NONE: ToolChoice(kind="none"),
    pb.TOOL_CHOICE_MODE_AUTO: ToolChoice(kind="auto"),
    pb.TOOL_CHOICE_MODE_REQUIRED: ToolChoice(kind="required"),
}


class Chat:
    """One call of Chat: its input, and the messages of its stream."""

    def __init__(self, message: pb.ChatRequest, tools: ToolUse) -> None:
        self._message = message
        self._tools = tools
        self._turns = Turns(tools)
        self._by_index: dict[int, Turn] = {}
        self._is_first = True

    @classmethod
    def from_message(cls, message: pb.ChatRequest, *, tool_format: ToolCallFormat | None) -> Self:
        """Return the call of a message; `tool_format` is how the model writes tool calls.

        Raises InvalidRequestError for invalid tools.
        """
        tools = _read_tools(message.tools)
        return cls(message, ToolUse(tools, _read_choice(message), tool_format=tool_format))

    def to_input(
        self,
        call: RpcCall,
        tenant: Tenant,
        size: RequestSize,
        *,
        known_variables: Callable[[bool], frozenset[str]],
        note_ignored: Callable[[str], None],
    ) -> GenerationInput:
        """Return the servicer's input. Raises InvalidRequestError.

        `known_variables` returns the variables that the chat template reads, with tools or without;
        `note_ignored` is called with the names of fields that set others.
        """
        message = self._message
        prompt = _read_prompt(
            message,
            self._tools.for_template,
            size,
            known_variables=lambda: known_variables(self._tools.is_read),
            note_ignored=note_ignored,
        )
        given = generation_input(prompt, message, call, tenant)
        answer = given.sampling.get("structure")
        assert answer is None or isinstance(answer, Structure)
        structure = self._tools.structure(answer, "structure")
        if structure is not None:
            given = replace(given, sampling={**given.sampling, "structure": structure})
        if self._tools.is_read and given.beam_length_penalty is not None:
            raise invalid_field("tools", "cannot be combined with beam_search.")
        if self._tools.is_read:
            # Many models mark tool calls by special tokens.
            given = replace(given, skips_special_tokens=False)
        return given

    def begin(self, reasoning: Reasoning | None, token_bytes: TokenBytes) -> None:
        """Prepare for outputs, with the reasoning of the call's turns."""
        self._turns = Turns(self._tools, reasoning, token_bytes)

    def response(self, request_id: str, output: GenerationOutput) -> pb.ChatResponse:
        """Return the response message of the next output."""
        response = pb.ChatResponse(request_id=request_id)
        for sequence in output.sequences:
            self._add_sequence(response, sequence)
        write_frame(response, output, is_first=self._is_first)
        if output.is_last:
            response.usage.num_reasoning_tokens = self._turns.num_reasoning_tokens
        self._is_first = False
        return response

    def _add_sequence(self, response: pb.ChatResponse, output: SequenceOutput) -> None:
        # Built in place: protobuf copies a message that is added to another.
        add = response.sequences.add
        if not (self._turns.are_read or output.finish_reason or output.logprobs):
            # The fast path of most tokens.
            add(index=output.index, content=output.text, token_ids=output.token_ids)
            return
        delta = self._delta(output)
        add(
            index=output.index,
            reasoning=delta.reasoning,
            content=delta.content,
            tool_calls=[_call_delta(call) for call in delta.calls],
            token_ids=output.token_ids,
            logprobs=logprobs_of(output.logprobs),
            finish_reason=self._finish_reason(output),
            stop_reason=stop_reason(output),
        )

    def _delta(self, output: SequenceOutput) -> TurnDelta:
        if not self._turns.are_read:
            return TurnDelta(content=output.text)
        turn = self._by_index.get(output.index)
        if turn is None:
            turn = self._by_index[output.index] = self._turns.begin_turn()
        return turn.read(output)

    def _finish_reason(self, output: SequenceOutput) -> pb.FinishReason:
        turn = self._by_index.get(output.index)
        has_calls = turn is not None and turn.has_calls
        if has_calls and output.finish_reason is FinishReason.STOP:
            return pb.FINISH_REASON_TOOL_CALLS
        return finish_reason(output)


def read_tokenize(
    message: pb.TokenizeRequest,
    tenant: Tenant,
    size: RequestSize,
    *,
    known_variables: Callable[[bool], frozenset[str]],
    note_ignored: Callable[[str], None],
) -> TokenizeInput:
    """Return the servicer's input; see `Chat.to_input`. Raises InvalidRequestError."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError("One of text or conversation must be set.", param="prompt")
    if kind == "text":
        return tokenize_input(message.text, message, tenant)
    if message.HasField("add_special_tokens") and not message.add_special_tokens:
        raise invalid_field(
            "add_special_tokens",
            "= false requires text; a chat template adds its own special tokens.",
        )
    conversation = message.conversation
    tools = _read_tools(conversation.tools)
    prompt = _read_prompt(
        conversation,
        tuple(tool.for_template() for tool in tools),
        size,
        known_variables=lambda: known_variables(bool(tools)),
        note_ignored=note_ignored,
    )
    return tokenize_input(prompt, message, tenant)


def _read_prompt(
    message: pb.ChatRequest | pb.Conversation,
    tools: tuple[Mapping[str, object], ...],
    size: RequestSize,
    *,
    known_variables: Callable[[], frozenset[str]],
    note_ignored: Callable[[str], None],
) -> ChatPrompt:
    """Return the prompt of a conversation. Raises InvalidRequestError."""
    documents = _read_documents(message.documents)
    variables = _read_object(message.chat_template_kwargs, "chat_template_kwargs")
    messages = _read_messages(message.messages, size)
    template = message.chat_template or None
    known = known_variables() if template is None else None
    given = TemplateArguments(variables, documents=documents)
    return ChatPrompt(
        messages,
        tools,
        adds_generation_prompt=not message.continue_final_message,
        continues_final_message=message.continue_final_message,
        variables=given.variables(known, note_ignored),
        template=template,
    )


def _read_messages(
    messages: Sequence[pb.ChatMessage], size: RequestSize
) -> tuple[ChatMessage, ...]:
    check_num_messages(len(messages), size)
    check_size("messages", len(messages), size.num_messages)
    return tuple(_read_message(message, place) for place, message in enumerate(messages))


def _read_message(message: pb.ChatMessage, place: int) -> ChatMessage:
    role = _ROLES.get(message.role)
    where = f"messages.{place}"
    if role is None:
        names = ", ".join(pb.ChatRole.Name(number) for number in _ROLES)
        raise invalid_field(f"{where}.role", f"must be one of {names}, not {message.role}.")
    written = "".join(call.arguments for call in message.tool_calls)
    check_counts(written.encode(), f"{where}.tool_calls")
    calls: list[MessageToolCall] = []
    for number, call in enumerate(message.tool_calls):
        arguments = read_arguments(call.arguments, f"{where}.tool_calls.{number}.arguments")
        calls.append(MessageToolCall(id=call.id, name=call.name, arguments=arguments))
    return ChatMessage(
        role,
        message.content,
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id or None,
        name=message.name or None,
        reasoning=message.reasoning or None,
    )


def _read_choice(message: pb.ChatRequest) -> ToolChoice:
    is_parallel = message.parallel_tool_calls or not message.HasField("parallel_tool_calls")
    kind = message.tool_choice.WhichOneof("choice")
    if kind == "tool":
        choice = ToolChoice(kind="named", name=message.tool_choice.tool)
    elif not message.HasField("tool_choice"):
        choice = ToolChoice()
    elif message.tool_choice.mode in _MODES:
        choice = _MODES[message.tool_choice.mode]
    else:
        names = ", ".join(pb.ToolChoiceMode.Name(number) for number in _MODES)
        raise invalid_field(
            "tool_choice.mode", f"must be one of {names}, not {message.tool_choice.mode}."
        )
    return replace(choice, is_parallel=is_parallel)


def _read_tools(messages: Sequence[pb.Tool]) -> list[Tool]:
    check_size("tools", len(messages), MAX_TOOLS)
    tools: list[Tool] = []
    for place, message in enumerate(messages):
        where = f"tools.{place}"
        parameters = _read_object(message.parameters, f"{where}.parameters")
        tool = Tool(
            name=message.name,
            description=message.description or None,
            parameters=parameters or None,
            is_strict=message.strict,
        )
        tool.check_limits(where, schema_param=f"{where}.parameters")
        tools.append(tool)
    check_tools(tools)
    return tools


def _read_documents(texts: Sequence[str]) -> list[dict[str, object]] | None:
    if not texts:
        return None
    check_size("documents", len(texts), MAX_DOCUMENTS)
    return [_read_object(text, f"documents.{place}") for place, text in enumerate(texts)]


def _read_object(text: str, where: str) -> dict[str, object]:
    if not text:
        return {}
    try:
        return read_json(text.encode(), what=where)
    except InvalidRequestError as error:
        error.param = where
        raise


def _call_delta(call: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(
        index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments
    )

"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import FailFast

from cluster.serving.inputs import GenerationInput
from cluster.serving.json_body import Defaults, described, named_schema, renamed
from cluster.serving.openai.bodies.generation_body import GenerationBody
from cluster.serving.openai.bodies.messages import (
    Message,
    functions_field,
    read_choice,
    read_function_choice,
    read_functions,
    read_messages,
    read_prediction,
    read_tools,
    tools_field,
)
from cluster.serving.openai.bodies.sampling_fields import (
    CHAT_REJECTED,
    CHAT_WITHOUT_EFFECT,
    REJECTED,
    WITHOUT_EFFECT,
    bounds,
    template_variables_field,
    thinking_budget,
    thinking_budget_field,
)
from cluster.serving.text.template_arguments import (
    EFFORTS,
    MAX_DOCUMENTS,
    MAX_EFFORT,
    ChatPrompt,
    TemplateArguments,
    check_effort,
)
from cluster.serving.tools.tool import MAX_TOOLS
from cluster.serving.tools.tool_choice import ToolUse
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.sampling_params import MAX_LOGPROBS

if TYPE_CHECKING:
    from cluster.serving.tools.tool_calls import ToolCallFormat
    from pagedray.sampling_params import Structure

__all__ = ["MAX_MESSAGES", "ChatBody", "check_open_end"]

MAX_MESSAGES = 4096
_FUNCTION_NAMES = {"tools": "functions", "tool_choice": "function_call"}
"""Parameters of calls with functions, keyed by the parameters of tools."""


class ChatBody(GenerationBody):
    """A conversation for the model to continue."""

    defaults: ClassVar[Defaults] = {**WITHOUT_EFFECT, **CHAT_WITHOUT_EFFECT}
    ignored: ClassVar[Mapping[str, str]] = {
        name: reason for name, reason in GenerationBody.ignored.items() if name != "prediction"
    }
    rejected: ClassVar[Mapping[str, str]] = {**REJECTED, **CHAT_REJECTED}
    synonyms: ClassVar[Mapping[str, str]] = {
        **GenerationBody.synonyms,
        "enable_thinking": "chat_template_kwargs.enable_thinking",
        "input": "messages",
        "max_thinking_tokens": "thinking_token_budget",
        "prompt": "messages",
        "reasoning": "reasoning_effort",
        "thinking": "chat_template_kwargs.enable_thinking",
        "thinking_budget": "thinking_token_budget",
    }
    max_entries: ClassVar[Mapping[str, int]] = {
        "messages": MAX_MESSAGES,
        "functions": MAX_TOOLS,
        "tools": MAX_TOOLS,
        "documents": MAX_DOCUMENTS,
    }

    messages: Annotated[list[Message], FailFast()] = described(
        "The messages of the conversation.", ..., minItems=1, maxItems=MAX_MESSAGES
    )
    logprobs: bool = described(
        "Whether choices contain the log-probabilities of their tokens.", False
    )
    top_logprobs: int | None = bounds(
        "Number of most likely tokens to return at each position; requires logprobs = true.",
        0,
        MAX_LOGPROBS,
    )
    tools: Any = tools_field()
    tool_choice: Any = described(  # Any: a string or an object
        "Whether the model must call a function, may call one (`auto`), or must not call any "
        "(`none`). The arguments of a forced call follow the function's schema.",
        anyOf=[
            {"enum": ["none", "auto", "required"]},
            named_schema("ToolChoiceObject"),
            named_schema("AllowedToolsChoice"),
        ],
    )
    parallel_tool_calls: bool = described(
        "Whether a response may contain more than one tool call.", True
    )
    functions: Any = functions_field()
    function_call: Any = described(  # Any: a string or an object
        "The older form of `tool_choice`, for `functions`.",
        anyOf=[{"enum": ["none", "auto"]}, named_schema("NamedFunction")],
    )
    add_generation_prompt: bool = described(
        "Whether the chat template begins a message of the assistant at the end of the prompt.",
        True,
    )
    continue_final_message: bool = described(
        "Continue the last message; requires add_generation_prompt = false.", False
    )

    add_special_tokens: Literal[False] = described(
        "A chat template adds its own special tokens.", False
    )
    chat_template: str | None = described(
        "A chat template that replaces the model's, if the server runs with "
        "--trust-request-chat-template."
    )
    chat_template_kwargs: Any = template_variables_field()
    documents: Any = described(  # Any: JSON
        "Documents for the chat template, which must read them.",
        type="array",
        items={"type": "object"},
        maxItems=MAX_DOCUMENTS,
    )
    reasoning_effort: Any = described(  # Any: a string or a number
        "A variable of the chat template, a name or a number. Also sets `enable_thinking`: to "
        "false if it is `none`, otherwise to true. Ignored if the template reads neither.",
        anyOf=[{"enum": list(EFFORTS)}, {"type": "number", "minimum": 0, "maximum": MAX_EFFORT}],
    )

    prediction: Any = described(  # Any: an object, which is read when it is used
        "A text that the answer is likely to repeat in large part, such as a file to edit. Makes "
        "the answer faster on servers with --speculative-config, and never changes it.",
        type="object",
    )
    thinking_token_budget: int | None = thinking_budget_field()
    include_reasoning: bool = described(
        "Whether the response contains the model's reasoning.", True
    )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def has_functions(self) -> bool:
        """Whether the tools are given as functions, so that the response has `function_call`."""
        return self.functions is not None and self.functions != []

    def check_fields(self) -> None:
        super().check_fields()
        if self.top_logprobs and not self.logprobs:
            raise invalid_field("top_logprobs", "requires logprobs = true.")
        self._check_functions()
        check_open_end(self.add_generation_prompt, self.continue_final_message)

    def _check_functions(self) -> None:
        if not self.has_functions:
            if self.function_call not in (None, "none"):
                raise invalid_field("function_call", "requires functions.")
            return
        for name in ("tools", "tool_choice"):
            if getattr(self, name) not in (None, []):
                raise invalid_field("functions", f"cannot be combined with {name}.")

    def tool_use(self, tool_format: ToolCallFormat | None) -> ToolUse:
        """Return how the call uses tools. Raises InvalidRequestError."""
        if self.has_functions:
            functions = read_functions(self.functions)
            chosen = read_function_choice(self.function_call, functions)
            try:
                return ToolUse(functions, chosen, tool_format=tool_format)
            except InvalidRequestError as error:
                raise renamed(error, _FUNCTION_NAMES) from error
        tools = read_tools(self.tools)
        choice = read_choice(
            self.tool_choice, is_parallel=self.parallel_tool_calls, has_tools=bool(tools)
        )
        return ToolUse(tools, choice, tool_format=tool_format)

    def to_input(
        self,
        client_id: str | None,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        note_ignored: Callable[[str], None],
    ) -> GenerationInput:
        """Return the input of the call. Raises InvalidRequestError.

        `known_variables` are the variables that the model's chat template reads; `note_ignored` is
        called with the names of parameters that set others.
        """
        sampling = self.sampling()
        budget = thinking_budget(self.thinking_token_budget)
        if budget is not None:
            sampling["thinking_token_budget"] = budget
        structure = self._structure(tools)
        if structure is not None:
            sampling["structure"] = structure
        messages = read_messages(self.messages)
        prompt = ChatPrompt(
            messages,
            tools.for_template,
            self.add_generation_prompt,
            self.continue_final_message,
            TemplateArguments(
                self.chat_template_kwargs,
                check_effort(self.reasoning_effort, "reasoning_effort"),
                self.documents,
            ).variables(None if self.chat_template is not None else known_variables, note_ignored),
            self.chat_template,
        )
        return GenerationInput(
            prompts=(prompt,),
            sampling=sampling,
            model=self.model,
            client_id=self.client_id(client_id),
            priority=self.priority,
            beam_length_penalty=self.beam_length_penalty,
            is_resumable=self.is_resumable,
            # Some models mark a call with special tokens.
            skips_special_tokens=self.skip_special_tokens and not tools.is_read,
            includes_stop=self.include_stop_str_in_output,
            max_prompt_tokens=self.truncate_prompt_tokens,
            truncates_end=self.truncation_side == "right",
            cache_salt=self.cache_salt or "",
            prediction=read_prediction(self.prediction),
        )

    def names(self, tools: ToolUse) -> dict[str, str]:
        """Return the client's names for parameters of the engine that differ from them."""
        names = {"logprobs": "top_logprobs", "max_tokens": self.limit_name}
        if tools.sets_structure:
            names["structure"] = "functions" if self.has_functions else "tools"
        else:
            names |= self.structure_names()
        return names

    def _structure(self, tools: ToolUse) -> Structure | None:
        requested = self.requested_structure()
        try:
            return tools.structure(requested.structure, requested.param)
        except InvalidRequestError as error:
            raise renamed(error, _FUNCTION_NAMES if self.has_functions else {}) from error


def check_open_end(adds_generation_prompt: bool, continues_final_message: bool) -> None:
    """Raise InvalidRequestError if a new message and the last message are both to be generated."""
    if adds_generation_prompt and continues_final_message:
        raise invalid_field("continue_final_message", "requires add_generation_prompt = false.")

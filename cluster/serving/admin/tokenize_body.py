"""The bodies of POST /tokenize and POST /detokenize, in vLLM's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import FailFast

from cluster.serving.inputs import TokenizeInput
from cluster.serving.json_body import Body, described
from cluster.serving.openai.bodies.chat_body import MAX_MESSAGES, check_open_end
from cluster.serving.openai.bodies.messages import Message, read_messages, read_tools, tools_field
from cluster.serving.text.template_arguments import MAX_DOCUMENTS, ChatPrompt, TemplateArguments
from cluster.serving.tools.tool import MAX_TOOLS
from pagedray.errors import InvalidRequestError, invalid_field

if TYPE_CHECKING:
    from collections.abc import Callable


__all__ = ["DetokenizeBody", "TokenizeBody"]


class TokenizeBody(Body):
    """A text or a conversation to tokenize; exactly one of `prompt` and `messages`."""

    max_entries: ClassVar[Mapping[str, int]] = {
        "messages": MAX_MESSAGES,
        "tools": MAX_TOOLS,
        "documents": MAX_DOCUMENTS,
    }
    with_nulls: ClassVar[frozenset[str]] = frozenset(("messages",))

    model: str | None = described("The name of the model, which `/v1/models` lists.")
    prompt: str | None = described("The text to tokenize.")
    messages: Annotated[list[Message], FailFast()] = described(
        "The conversation to tokenize, as in /v1/chat/completions.",
        [],
        minItems=1,
        maxItems=MAX_MESSAGES,
    )
    add_special_tokens: bool | None = described(
        "Whether special tokens are added to `prompt`; true by default."
    )
    add_generation_prompt: bool = described("As in /v1/chat/completions.", True)
    continue_final_message: bool = described("As in /v1/chat/completions.", False)
    tools: Any = tools_field()
    chat_template: str | None = described("As in /v1/chat/completions; requires messages.")
    chat_template_kwargs: Any = described(  # Any: JSON
        "As in /v1/chat/completions; requires messages.", type="object"
    )
    documents: Any = described(  # Any: JSON
        "As in /v1/chat/completions; requires messages.",
        type="array",
        items={"type": "object"},
        maxItems=MAX_DOCUMENTS,
    )
    return_token_strs: bool = described(
        "Whether the response has the tokens as the vocabulary spells them.", False
    )

    def check_fields(self) -> None:
        has_messages = "messages" in self.model_fields_set
        if (self.prompt is not None) is has_messages:
            raise InvalidRequestError(
                "Exactly one of prompt and messages is required.", param="prompt"
            )
        for name in ("tools", "chat_template", "chat_template_kwargs", "documents"):
            if not has_messages and getattr(self, name) not in (None, {}, []):
                raise invalid_field(name, "requires messages.")
        if has_messages and self.add_special_tokens:
            raise invalid_field(
                "add_special_tokens",
                "requires prompt; a chat template adds its own special tokens.",
            )
        check_open_end(self.add_generation_prompt, self.continue_final_message)

    def to_input(
        self,
        *,
        known_variables: Callable[[bool], frozenset[str]],
        note_ignored: Callable[[str], None],
    ) -> TokenizeInput:
        """Return the input of the call. Raises InvalidRequestError.

        `known_variables` returns the variables that the model's chat template reads, with tools or
        without; `note_ignored` is called with the name of a parameter that sets other variables.
        """
        if self.prompt is not None:
            return TokenizeInput(
                prompt=self.prompt,
                add_special_tokens=self.add_special_tokens is not False,
                model=self.model,
            )
        tools = read_tools(self.tools)
        messages = read_messages(self.messages)
        known = None if self.chat_template is not None else known_variables(bool(tools))
        arguments = TemplateArguments(self.chat_template_kwargs, documents=self.documents)
        prompt = ChatPrompt(
            messages,
            tuple(tool.for_template() for tool in tools),
            self.add_generation_prompt,
            self.continue_final_message,
            arguments.variables(known, note_ignored),
            self.chat_template,
        )
        return TokenizeInput(prompt=prompt, model=self.model)


class DetokenizeBody(Body):
    """Token ids to detokenize, including special tokens."""

    ids_field: ClassVar[str | None] = "tokens"

    model: str | None = described("The name of the model, which `/v1/models` lists.")
    tokens: Any = described(  # Any: checked by the servicer
        "The token ids to detokenize.", ..., type="array", items={"type": "integer", "minimum": 0}
    )

    def token_ids(self) -> tuple[int, ...]:
        """Return the token ids. Raises InvalidRequestError."""
        if isinstance(self.tokens, list) and all(type(one) is int for one in self.tokens):
            return tuple(self.tokens)
        raise invalid_field("tokens", "must be a list of token ids.")

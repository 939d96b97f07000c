"""The body of POST /v1/messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from cluster.serving.anthropic.conversation_body import ConversationBody
from cluster.serving.inputs import GenerationInput, TokenizeInput
from cluster.serving.json_body import BodyPart, Defaults, json_text, read_part
from cluster.serving.openai.bodies.sampling_fields import IGNORED, bounds, cache_salt_field
from cluster.structured.grammar.grammar_text import MAX_TEXT_BYTES
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import MAX_STOP, MAX_STOP_LENGTH
from pagedray.structure import Structure

if TYPE_CHECKING:
    from cluster.serving.anthropic.conversation_body import ModelSupport
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["CountBody", "MessagesBody", "OutputFormat"]


class OutputFormat(BodyPart):
    """The schema that the text follows."""

    type: Literal["json_schema"]
    schema_: Any = Field(alias="schema", json_schema_extra={"type": "object"})  # Any: as above


class MessagesBody(ConversationBody):
    """A conversation for the model to continue."""

    defaults: ClassVar[Defaults] = {**ConversationBody.defaults, "seed": (-1,)}
    ignored: ClassVar[Mapping[str, str]] = {
        **ConversationBody.ignored,
        "diagnostics": "diagnostics are not available",
        "fallback_credit_token": "requests are not billed",
        "inference_geo": "requests are always processed where the server runs",
        "metadata": "an identifier of the end user",
        "service_tier": "there is only one service tier",
        "vllm_xargs": IGNORED["vllm_xargs"],
    }
    rejected: ClassVar[Mapping[str, str]] = {
        **ConversationBody.rejected,
        "seed": "use /v1/chat/completions",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        **ConversationBody.synonyms,
        "max_completion_tokens": "max_tokens",
        "max_output_tokens": "max_tokens",
        "stop": "stop_sequences",
    }

    max_tokens: int = Field(
        description="Maximum number of tokens to generate.", json_schema_extra={"minimum": 1}
    )
    stop_sequences: Any = Field(  # Any: checked by the validator
        None,
        description="Strings that end the output.",
        json_schema_extra={
            "type": "array",
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH},
            "maxItems": MAX_STOP,
        },
    )
    temperature: float | None = bounds("Sampling temperature; 0 is greedy.", 0, 100)
    top_p: float | None = bounds(
        "Cumulative probability of the most likely tokens to sample from.", 0, 1
    )
    top_k: int | None = bounds(
        "Number of most likely tokens to sample from; 0 or -1 samples from all.", -1
    )
    cache_salt: str | None = cache_salt_field()
    stream: bool = Field(
        False, description="Whether the response is a stream of server-sent events."
    )

    def to_input(
        self,
        client_id: str | None,
        tools: ToolUse,
        support: ModelSupport,
        *,
        note_ignored: Callable[[str], None],
    ) -> GenerationInput:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = self.prompt(tools, support, note_ignored=note_ignored)
        sampling: dict[str, object] = {"max_tokens": self.max_tokens}
        for name in ("temperature", "top_p", "top_k"):
            if getattr(self, name) is not None:
                sampling[name] = getattr(self, name)
        if support.can_limit_reasoning and self.thinking_budget is not None:
            sampling["thinking_token_budget"] = self.thinking_budget
        if self.stop_sequences is not None:
            is_list = isinstance(self.stop_sequences, list)
            sampling["stop"] = tuple(self.stop_sequences) if is_list else self.stop_sequences
        structure = tools.structure(self._structure(), "output_config.format")
        if structure is not None:
            sampling["structure"] = structure
        return GenerationInput(
            prompts=(prompt,),
            sampling=sampling,
            model=self.model,
            client_id=client_id,
            cache_salt=self.cache_salt or "",
            # Some models mark a call with special tokens.
            skips_special_tokens=not tools.is_read,
        )

    def _structure(self) -> Structure | None:
        given = None if self.output_config is None else self.read_output_config().format
        if given is None:
            return None
        param = "output_config.format"
        schema = given.get("schema") if isinstance(given, dict) else None
        read_part(OutputFormat, {**given, "schema": {}} if schema is not None else given, param)
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                f"{param}.schema must be a JSON Schema.", param=f"{param}.schema"
            )
        text = json_text(schema, f"{param}.schema", most_bytes=MAX_TEXT_BYTES)
        return Structure(kind="json_schema", text=text)


class CountBody(ConversationBody):
    """A conversation whose tokens are counted."""

    def to_input(
        self, tools: ToolUse, support: ModelSupport, *, note_ignored: Callable[[str], None]
    ) -> TokenizeInput:
        """Return the input of the call. Raises InvalidRequestError."""
        prompt = self.prompt(tools, support, note_ignored=note_ignored)
        return TokenizeInput(prompt=prompt, model=self.model)

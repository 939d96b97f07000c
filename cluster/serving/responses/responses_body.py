"""The bodies of POST /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from cluster.serving.inputs import GenerationInput, TokenizeInput
from cluster.serving.json_body import Defaults, described
from cluster.serving.openai.bodies.sampling_fields import (
    IGNORED,
    IN_IGNORED,
    MODERATION,
    UNLIMITED,
    SamplingFields,
    bounds,
    model_field,
    thinking_budget,
    thinking_budget_field,
)
from cluster.serving.responses.input_body import InputBody
from cluster.serving.responses.items import check_included_fields
from pagedray.errors import invalid_field

if TYPE_CHECKING:
    from cluster.serving.openai.bodies.sampling_fields import RequestedStructure
    from cluster.serving.text.template_arguments import ChatMessage
    from cluster.serving.tools.tool_choice import ToolUse

__all__ = ["Echo", "InputTokensBody", "ResponsesBody"]

_encode = msgspec.json.Encoder().encode

_MAX_LABELS = 16
_MAX_LABEL_NAME = 64
_MAX_LABEL_LENGTH = 512
"""These limits of metadata are OpenAI's."""
_MAX_INCLUDED = 64


@dataclass(frozen=True, slots=True)
class Echo:
    """The parameters that a response repeats."""

    fields: Mapping[str, object]
    large: bytes
    """Fields that may be large, as members of a JSON object."""


class ResponsesBody(InputBody, SamplingFields):
    """A conversation for the model to continue."""

    max_entries: ClassVar[Mapping[str, int]] = {**InputBody.max_entries, "include": _MAX_INCLUDED}
    defaults: ClassVar[Defaults] = {
        "background": (False,),
        "context_management": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    ignored: ClassVar[Mapping[str, str]] = {
        **{
            name: IGNORED[name]
            for name in (
                "mm_processor_kwargs",
                "prompt_cache_key",
                "prompt_cache_options",
                "prompt_cache_retention",
                "safety_identifier",
                "session_id",
                "service_tier",
                "user",
                "vllm_xargs",
            )
        },
        "client_metadata": "labels for OpenAI's logs",
        "max_tool_calls": "applies to OpenAI's built-in tools, which are not available",
        "stream_options": "streams are not obfuscated",
    }
    in_ignored: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "vllm_xargs": IN_IGNORED["vllm_xargs"],
        "stream_options": {"resumable": "use /v1/chat/completions"},
    }
    rejected: ClassVar[Mapping[str, str]] = {
        **InputBody.rejected,
        "access_programs": "access programs are not available",
        "background": "responses are not generated in the background",
        "background_options": "responses are not generated in the background",
        "context_management": "shorten the input instead",
        "image": "the output is text",
        "moderation": MODERATION,
        "prompt": "prompts are not stored; send instructions and input",
        "top_logprobs": "use /v1/chat/completions",
    }
    synonyms: ClassVar[Mapping[str, str]] = {
        **InputBody.synonyms,
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "thinking_budget": "thinking_token_budget",
    }

    model: str | None = model_field()
    store: bool | None = described(
        "Whether the response is kept in memory, so that it can be continued, read and deleted by "
        "its id; true by default."
    )
    max_output_tokens: int | None = bounds(
        "Maximum number of tokens to generate; -1 is as many as fit into the context.", UNLIMITED
    )
    thinking_token_budget: int | None = thinking_budget_field()
    metadata: Any = described(  # Any: strings, within limits that pydantic would report for each
        f"Up to {_MAX_LABELS} strings with names, which the response repeats.",
        type="object",
        additionalProperties={"type": "string"},
    )
    include: Any = described(  # Any: only known strings
        "OpenAI's names of fields, which have no effect; log-probabilities and unknown names are "
        "rejected.",
        type="array",
        items={"type": "string"},
        maxItems=_MAX_INCLUDED,
    )
    stream: bool = described("Whether the response is a stream of server-sent events.", False)

    def check_fields(self) -> None:
        if self.metadata is not None:
            _check_labels(self.metadata)
        if self.include is None:
            return
        if not isinstance(self.include, list):
            raise invalid_field("include", "must be a list of strings.")
        check_included_fields(self.include)

    def to_input(
        self,
        client_id: str | None,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        note_ignored: Callable[[str], None],
        earlier: tuple[ChatMessage, ...] = (),
    ) -> GenerationInput:
        """Return the input of the call, after the `earlier` messages.

        Raises InvalidRequestError.
        """
        prompt = self.prompt(
            tools, known_variables=known_variables, note_ignored=note_ignored, earlier=earlier
        )
        sampling = self.common_sampling()
        if self.max_output_tokens not in (None, UNLIMITED):
            sampling["max_tokens"] = self.max_output_tokens
        budget = thinking_budget(self.thinking_token_budget)
        if budget is not None:
            sampling["thinking_token_budget"] = budget
        requested = self.requested_structure()
        structure = tools.structure(requested.structure, requested.param)
        if structure is not None:
            sampling["structure"] = structure
        return GenerationInput(
            prompts=(prompt,),
            sampling=sampling,
            model=self.model,
            client_id=self.client_id(client_id),
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            # Some models mark a call with special tokens.
            skips_special_tokens=self.skip_special_tokens and not tools.is_read,
            includes_stop=self.include_stop_str_in_output,
        )

    def requested_structure(self) -> RequestedStructure:
        """Return the requested structure of the text. Raises InvalidRequestError."""
        requested = super().requested_structure()
        self.add_structured_outputs(requested)
        return requested

    def names(self, tools: ToolUse) -> dict[str, str]:
        """Return the client's names for parameters of the engine that differ from them."""
        structure = "tools" if tools.sets_structure else self.requested_structure().param
        return {
            "max_tokens": "max_output_tokens",
            "messages": "input",
            "structure": structure or "text.format",
        }

    def echoed(self, *, is_stored: bool) -> Echo:
        """Return the parameters that a response repeats."""
        tools = [_encode(tool) for tool in self.tools or ()]
        instructions = _encode(self.instructions)
        text = _encode(self.text or {"format": {"type": "text"}})
        parts = (instructions, text, b",".join(tools), _encode(self.metadata or {}))
        large = b'"instructions":%b,"text":%b,"tools":[%b],"metadata":%b' % parts
        fields = {
            "max_output_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {
                "effort": None if self.reasoning is None else self.reasoning.effort,
                "summary": None,
            },
            "store": is_stored,
            "temperature": self.temperature,
            "tool_choice": self.tool_choice or "auto",
            "top_p": self.top_p,
            "truncation": "disabled",
        }
        return Echo(fields, large)


class InputTokensBody(InputBody):
    """A conversation whose tokens are counted."""

    defaults: ClassVar[Defaults] = {"truncation": ("disabled",)}
    rejected: ClassVar[Mapping[str, str]] = {
        **InputBody.rejected,
        "personality": "describe it in instructions",
    }

    model: str | None = described("The name of the model, which `/v1/models` lists.")

    def to_input(
        self,
        tools: ToolUse,
        *,
        known_variables: frozenset[str],
        note_ignored: Callable[[str], None],
        earlier: tuple[ChatMessage, ...] = (),
    ) -> TokenizeInput:
        """Return the input of the call. Raises InvalidRequestError."""
        # It may be invalid.
        self.requested_structure()
        prompt = self.prompt(
            tools, known_variables=known_variables, note_ignored=note_ignored, earlier=earlier
        )
        return TokenizeInput(prompt=prompt, model=self.model)


def _check_labels(labels: object) -> None:
    """Raise InvalidRequestError unless labels are strings within the limits."""
    if (
        not isinstance(labels, dict)
        or len(labels) > _MAX_LABELS
        or any(len(name) > _MAX_LABEL_NAME for name in labels)
        or any(not isinstance(one, str) or len(one) > _MAX_LABEL_LENGTH for one in labels.values())
    ):
        raise invalid_field(
            "metadata",
            f"must be an object of at most {_MAX_LABELS} strings of up to {_MAX_LABEL_LENGTH} "
            f"characters, with names of up to {_MAX_LABEL_NAME}.",
        )

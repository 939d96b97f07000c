"""How an endpoint writes the choices of its responses, whether complete or streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pagedray.request import FinishReason

if TYPE_CHECKING:
    from cluster.serving.http.errors import Json
    from cluster.serving.openai.response_choice import (
        CompleteChoice,
        ResponseChoice,
        ResponseOptions,
        StreamedChoice,
    )
    from cluster.serving.servicer import GenerationCall, Usage
    from cluster.serving.text.text_stream import SequenceOutput
    from cluster.serving.text.token_bytes import TokenBytes
    from cluster.serving.tools.turns import Turn
    from pagedray.batch import TokenLogprobs

__all__ = ["ChoiceFormat"]


class ChoiceFormat(ABC):
    """How one endpoint writes the response to one call."""

    id_prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    bare_begin: ClassVar[bytes]
    """The JSON between a choice's index and its text."""
    bare_end: ClassVar[bytes]
    has_prompt_in_choice: ClassVar[bool]
    """Whether what belongs to a prompt is written in its choices: there may be several prompts."""

    def __init__(
        self, generation: GenerationCall, token_bytes: TokenBytes, options: ResponseOptions
    ) -> None:
        self.generation = generation
        self.token_bytes = token_bytes
        self.options = options

    def head(self, kind: str) -> Json:
        """Return the fields of an object of this kind that do not depend on the output."""
        return {
            "id": f"{self.id_prefix}-{self.generation.id}",
            "object": kind,
            "created": self.options.created_s,
            "model": self.options.model,
        }

    def usage(self, usage: Usage) -> Json:
        """Return the numbers of tokens."""
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_generated_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        }

    def prompt_ids(self, prompt_index: int) -> Json:
        """Return the token ids of a prompt."""
        return {"prompt_token_ids": self.generation.prompts[prompt_index]}

    def begin_turn(self) -> Turn | None:
        """Return what finds reasoning and tool calls in a choice, or None if nothing does."""
        return None

    def reason(self, sequence: SequenceOutput, choice: ResponseChoice) -> str | None:
        """Return why a choice has ended, or None if it has not."""
        reason = sequence.finish_reason
        # OpenAI defines no such reason; an event with the error follows.
        return None if reason is None or reason is FinishReason.ERROR else reason.value

    def logprobs(self, output: SequenceOutput, choice: ResponseChoice) -> Json | None:
        """Return the log-probabilities of an output's tokens, or None if they are not requested."""
        if not self.options.has_logprobs:
            return None
        tokens = zip(output.token_ids, output.logprobs, strict=True)
        return self.token_logprobs(list(tokens), choice)

    def token_text(self, token_id: int) -> str:
        """Return a token as log-probabilities name it."""
        if self.options.names_tokens_by_id:
            return f"token_id:{token_id}"
        return self.token_bytes.text_of(token_id)

    def add_content(self, sequence: SequenceOutput, choice: CompleteChoice) -> None:
        """Add an output to a complete choice."""
        choice.texts.append(sequence.text)

    @abstractmethod
    def content(self, choice: CompleteChoice) -> Json:
        """Return the content of a complete choice."""

    @abstractmethod
    def delta(self, sequence: SequenceOutput, choice: StreamedChoice) -> Json:
        """Return the delta of a streamed choice, which may be empty."""

    @abstractmethod
    def wrapped(self, delta: Json) -> Json:
        """Return the content of a streamed choice with this delta."""

    @abstractmethod
    def token_logprobs(
        self, tokens: list[tuple[int, TokenLogprobs]], choice: ResponseChoice
    ) -> Json:
        """Return log-probabilities in the endpoint's format."""

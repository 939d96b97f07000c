"""The body of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from cluster.serving.inputs import GenerationInput, InfillPrompt, Prompt
from cluster.serving.json_body import Defaults, described
from cluster.serving.openai.bodies.generation_body import GenerationBody
from cluster.serving.openai.bodies.sampling_fields import (
    REJECTED,
    UNLIMITED,
    WITHOUT_EFFECT,
    bounds,
    prompts_field,
)
from pagedray.errors import invalid_field
from pagedray.sampling_params import MAX_LOGPROBS, MAX_N

__all__ = ["CompletionBody"]

_DEFAULT_MAX_TOKENS = 16


class CompletionBody(GenerationBody):
    """Texts for the model to continue."""

    defaults: ClassVar[Defaults] = {**WITHOUT_EFFECT, "thinking_token_budget": (-1,)}
    rejected: ClassVar[Mapping[str, str]] = {
        **REJECTED,
        "thinking_token_budget": "reasoning is separated from the text by /v1/chat/completions",
    }
    ids_field: ClassVar[str | None] = "prompt"
    synonyms: ClassVar[Mapping[str, str]] = {
        **GenerationBody.synonyms,
        "input": "prompt",
        "messages": "prompt",
    }

    prompt: Any = prompts_field(MAX_N)  # Any: its length is checked before its entries
    # As in chats, false is the same as null.
    logprobs: Annotated[
        int | None, BeforeValidator(lambda given: None if given is False else given)
    ] = bounds("Number of most likely tokens to return at each position.", 0, MAX_LOGPROBS)
    max_tokens: int | None = bounds(
        "Maximum number of tokens to generate, by default 16; -1 is as many as fit into the "
        "context, and 0 requires echo or prompt_logprobs.",
        UNLIMITED,
    )
    echo: bool = described(
        "Whether the text begins with the prompt, and the log-probabilities with those of its "
        "tokens, which require stream = false.",
        False,
    )
    suffix: str = described(
        "The text after the generated text, for models that fill in the middle; requires text "
        "prompts.",
        "",
    )
    add_special_tokens: bool = described(
        "Whether special tokens such as a leading BOS are added to text prompts.", True
    )

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def hides_output(self) -> bool:
        """Whether only the prompt is requested."""
        return self.limit == 0

    def check_fields(self) -> None:
        super().check_fields()
        if self.echo and self.logprobs is not None and self.stream:
            raise invalid_field("echo", "with logprobs requires stream = false.")
        if self.suffix:
            self._check_suffix()
        if self.hides_output and (
            self.stream or not (self.echo or self.prompt_logprobs is not None)
        ):
            raise invalid_field(
                self.limit_name, "= 0 requires echo or prompt_logprobs, and stream = false."
            )

    def _check_suffix(self) -> None:
        for name in ("echo", "truncate_prompt_tokens"):
            if getattr(self, name):
                raise invalid_field("suffix", f"cannot be combined with {name}.")

    def to_input(self, client_id: str | None) -> GenerationInput:
        """Return the input of the call. Raises InvalidRequestError."""
        sampling = self.sampling()
        if self.hides_output:
            # The engine ends a prompt with a token.
            sampling["max_tokens"] = 1
        if self.echo and self.logprobs is not None:
            sampling["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        structure = self.requested_structure().structure
        if structure is not None:
            sampling["structure"] = structure
        return GenerationInput(
            prompts=_prompts_of(self.prompt, self.suffix),
            sampling=sampling,
            default_max_tokens=None if self.is_unlimited else _DEFAULT_MAX_TOKENS,
            model=self.model,
            client_id=self.client_id(client_id),
            priority=self.priority,
            beam_length_penalty=self.beam_length_penalty,
            is_resumable=self.is_resumable,
            skips_special_tokens=self.skip_special_tokens,
            includes_stop=self.include_stop_str_in_output,
            adds_special_tokens=self.add_special_tokens,
            max_prompt_tokens=self.truncate_prompt_tokens,
            truncates_end=self.truncation_side == "right",
            cache_salt=self.cache_salt or "",
        )


def _prompts_of(given: object, suffix: str) -> tuple[Prompt, ...]:
    prompts = _given_prompts(given)
    if not suffix:
        return prompts
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise invalid_field("suffix", "requires prompt to be a string or a list of strings.")
    return tuple(InfillPrompt(text, suffix) for text in texts)


def _given_prompts(given: object) -> tuple[Prompt, ...]:
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list):
        # A Python loop over half a million entries would block the event loop.
        kinds = set(map(type, given))
        if kinds <= {int}:
            return (tuple(given),)
        if kinds == {str}:
            return tuple(given)
        if kinds == {list} and all(set(map(type, entry)) <= {int} for entry in given):
            return tuple(map(tuple, given))
    raise invalid_field(
        "prompt",
        "must be a string, a list of strings, a list of token ids or a list of such lists.",
    )

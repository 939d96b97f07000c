"""The body of POST /v1/embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from cluster.serving.inputs import EmbeddingInput
from cluster.serving.json_body import Body, Defaults
from cluster.serving.openai.bodies.sampling_fields import (
    IGNORED,
    bounds,
    model_field,
    prompts_field,
)
from pagedray.errors import InvalidRequestError

__all__ = ["MAX_INPUTS", "EmbeddingBody"]

MAX_INPUTS = 2048


class EmbeddingBody(Body):
    """Texts to embed."""

    ids_field: ClassVar[str | None] = "input"
    defaults: ClassVar[Defaults] = {"add_special_tokens": (True,), "priority": (0,)}
    ignored: ClassVar[Mapping[str, str]] = {"user": IGNORED["user"]}
    synonyms: ClassVar[Mapping[str, str]] = {"prompt": "input", "text": "input", "texts": "input"}

    model: str | None = model_field()
    input: Any = prompts_field(MAX_INPUTS, min_items=1)  # Any: as for a prompt
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64` encodes little-endian 32-bit floats."
    )
    dimensions: int | None = bounds("Number of leading dimensions of the embeddings to return.", 1)
    prompt_name: str | None = Field(
        None, description="The name of one of the model's prompts, which is prepended to texts."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Keep only this many tokens of each text, including the special tokens around "
        "it; -1 keeps as many as the model takes.",
        json_schema_extra={"minimum": -1},
    )
    truncation_side: Literal["left", "right"] = Field(
        "right",
        description="Where truncate_prompt_tokens removes tokens: `left` keeps the end of the "
        "text.",
    )

    def to_input(self) -> EmbeddingInput:
        """Return the input of the call. Raises InvalidRequestError."""
        prompts = _prompts_of(self.input)
        return EmbeddingInput(
            param="input",
            prompts=prompts,
            prompt_name=self.prompt_name,
            dimensions=self.dimensions,
            max_prompt_tokens=self.truncate_prompt_tokens,
            truncates_end=self.truncation_side == "right",
            model=self.model,
        )


def _prompts_of(given: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str) and given:
        return (given,)
    if isinstance(given, list) and given:
        # Python loops over the entries would take long.
        kinds = set(map(type, given))
        if kinds == {int}:
            return (tuple(given),)
        if len(given) > MAX_INPUTS:
            raise InvalidRequestError(
                f"input may have at most {MAX_INPUTS} entries, not {len(given)}.", param="input"
            )
        if kinds == {str} and all(given):
            return tuple(given)
        if kinds == {list}:
            texts: list[tuple[int, ...]] = []
            for entry in given:
                if not set(map(type, entry)) <= {int}:
                    break
                texts.append(tuple(entry))
            else:
                return tuple(texts)
    raise InvalidRequestError(
        "input must be a string, a list of strings, a list of token ids or a list of such lists; "
        "none of them may be empty.",
        param="input",
    )

"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from cluster.serving.http.schema import Body
from cluster.serving.inputs import EmbeddingInput
from cluster.serving.openai.generation_body import bounds, prompts_field
from pagedray.errors import InvalidRequestError

__all__ = ["MAX_INPUTS", "EmbeddingBody"]

MAX_INPUTS = 2048


class EmbeddingBody(Body):
    """Texts to embed."""

    model: str
    input: Any = prompts_field(MAX_INPUTS, min_items=1)  # Any: as for a prompt
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="`base64` encodes little-endian 32-bit floats."
    )
    dimensions: int | None = bounds(1)
    user: str | None = Field(
        None, description="An identifier of the end user; accepted and ignored."
    )

    def to_input(self) -> EmbeddingInput:
        """Return the input of the call. Raises InvalidRequestError."""
        return EmbeddingInput(
            prompts=_prompts_of(self.input), dimensions=self.dimensions, model=self.model
        )


def _prompts_of(given: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str) and given:
        return (given,)
    if isinstance(given, list) and given:
        if all(type(entry) is int for entry in given):
            return (tuple(given),)
        if len(given) > MAX_INPUTS:
            raise InvalidRequestError(
                f"input may have at most {MAX_INPUTS} entries, not {len(given)}.", param="input"
            )
        if all(isinstance(entry, str) and entry for entry in given):
            return tuple(given)
        if all(isinstance(entry, list) for entry in given) and all(
            type(token_id) is int for entry in given for token_id in entry
        ):
            return tuple(tuple(entry) for entry in given)
    raise InvalidRequestError(
        "input must be a string, a list of strings, a list of token ids or a list of such lists; "
        "none of them may be empty.",
        param="input",
    )

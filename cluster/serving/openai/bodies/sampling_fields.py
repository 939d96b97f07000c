"""The parameters of sampling that all endpoints which generate text have in common."""

from __future__ import annotations

from typing import Any

from pydantic import Field, JsonValue

from cluster.serving.http.schema import Body
from cluster.serving.inputs import MAX_SALT_LENGTH
from cluster.serving.openai.bodies.field_kinds import bounds
from pagedray.request import MAX_STOP, MAX_STOP_LENGTH

__all__ = ["SamplingFields"]

_NAMES = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "ignore_eos",
)
_ONE_STOP: dict[str, JsonValue] = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_LENGTH}


class SamplingFields(Body):
    """Parameters by OpenAI's and vLLM's names."""

    temperature: float | None = bounds("Sampling temperature; 0 is greedy.", 0, 100)
    top_k: int | None = bounds(
        "Number of most likely tokens to sample from; 0 or -1 samples from all.", -1
    )
    top_p: float | None = bounds(
        "Cumulative probability of the most likely tokens to sample from.", 0, 1
    )
    min_p: float | None = bounds(
        "Minimum probability of a token, relative to that of the most likely token.", 0, 1
    )
    repetition_penalty: float | None = bounds(
        "Divides positive and multiplies negative logits of tokens in the prompt or the output.",
        0.01,
        100,
    )
    presence_penalty: float | None = bounds(
        "Subtracted from the logits of tokens in the output.", -2, 2
    )
    frequency_penalty: float | None = bounds(
        "Subtracted from a token's logit once for each of its occurrences in the output.", -2, 2
    )
    seed: int | None = bounds(
        "Random seed, which makes sampling reproducible.", -(2**63), 2**63 - 1
    )
    ignore_eos: bool | None = Field(
        None, description="Whether to generate past the model's end-of-sequence tokens."
    )
    # The validator checks its length before its entries.
    stop: Any = Field(
        None,
        description="Strings that end the output.",
        json_schema_extra={
            "anyOf": [_ONE_STOP, {"type": "array", "items": _ONE_STOP, "maxItems": MAX_STOP}]
        },
    )
    priority: int = Field(
        0,
        description="Requests with a lower value are served earlier, and may preempt running "
        "requests of the same tenant with a higher value.",
        json_schema_extra={"minimum": -(2**31), "maximum": 2**31 - 1},
    )
    cache_salt: str | None = Field(
        None,
        description="Prefixes are shared only by requests with the same salt.",
        json_schema_extra={"minLength": 1, "maxLength": MAX_SALT_LENGTH},
    )

    def common_sampling(self) -> dict[str, object]:
        """Return the fields of SamplingParams that the client set."""
        given: dict[str, object] = {
            name: value for name in _NAMES if (value := getattr(self, name)) is not None
        }
        if self.stop is not None:
            given["stop"] = _stop_of(self.stop)
        return given


def _stop_of(given: object) -> object:
    if isinstance(given, str):
        return (given,)
    return tuple(given) if isinstance(given, list) else given

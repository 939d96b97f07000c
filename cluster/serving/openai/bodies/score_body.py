"""The bodies of POST /v1/embeddings, /score and /rerank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from cluster.serving.embedding_validator import MAX_PAIRS
from cluster.serving.inputs import EmbeddingInput, ScoreInput
from cluster.serving.json_body import Body, BodyPart, Defaults, described, named_schema, read_part
from cluster.serving.openai.bodies.sampling_fields import (
    IGNORED,
    bounds,
    model_field,
    prompts_field,
)
from pagedray.errors import invalid_field

__all__ = ["EmbeddingBody", "RerankBody", "ScoreBody"]

_TEXT: dict[str, JsonValue] = {"type": "string", "minLength": 1}
_TEXTS: dict[str, JsonValue] = {
    "type": "array",
    "items": _TEXT,
    "minItems": 1,
    "maxItems": MAX_PAIRS,
}
_DEFAULTS: Defaults = {"priority": (0,), "truncate_prompt_tokens": ()}

MAX_INPUTS = 2048


def _instruction() -> Any:  # Any: as pydantic declares a field
    return described("The instruction for rerankers that take one, such as Qwen3-Reranker.")


class DocumentObject(BodyPart):
    """A document as an object."""

    text: str = Field(json_schema_extra={"minLength": 1})


class RerankBody(Body):
    """Documents to sort by their relevance to a query."""

    defaults: ClassVar[Defaults] = {**_DEFAULTS, "max_tokens_per_doc": ()}
    max_entries: ClassVar[Mapping[str, int]] = {"documents": MAX_PAIRS}

    model: str | None = model_field()
    query: str = described("The text that documents are compared with.", ..., minLength=1)
    documents: list[Any] = described(  # Any: checked below, as a list may be long
        "The documents: strings, or objects with `text`.",
        ...,
        **_TEXTS | {"items": {"anyOf": [_TEXT, named_schema("DocumentObject")]}},
    )
    top_n: int | None = bounds(
        "Maximum number of results, which are the documents with the highest scores; 0 is all.", 0
    )
    instruction: str | None = _instruction()
    return_documents: bool = described("Whether results contain the documents.", True)
    user: str | None = described("An identifier of the end user; accepted and ignored.")

    def check_fields(self) -> None:
        if self.top_n is not None and self.top_n < 0:
            raise invalid_field("top_n", f"must be at least 0, not {self.top_n}.")

    def to_input(self) -> ScoreInput:
        """Return the input of the call. Raises InvalidRequestError."""
        texts: list[str] = []
        for index, given in enumerate(self.documents):
            texts.append(_document_text(given, f"documents.{index}"))
        query = _checked(self.query, "query")
        return ScoreInput(
            pairs=tuple((query, text) for text in texts),
            params=("query", "documents"),
            instruction=self.instruction,
            model=self.model,
        )


class ScoreBody(Body):
    """Texts to compare: one with each of the others, or two lists pair by pair."""

    defaults: ClassVar[Defaults] = _DEFAULTS

    model: str | None = model_field()
    text_1: Any = described(  # Any: a string or a list
        "One text, or as many as `text_2` has.", ..., anyOf=[_TEXT, _TEXTS]
    )
    text_2: Any = described(  # Any: a string or a list
        "The texts that are compared with `text_1`.", ..., anyOf=[_TEXT, _TEXTS]
    )
    instruction: str | None = _instruction()
    user: str | None = described("An identifier of the end user; accepted and ignored.")

    def to_input(self) -> ScoreInput:
        """Return the input of the call. Raises InvalidRequestError."""
        first = _texts_of(self.text_1, "text_1")
        second = _texts_of(self.text_2, "text_2")
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise invalid_field(
                "text_1",
                f"must be one text, or as many as text_2 has, {len(second)}, not {len(first)}.",
            )
        return ScoreInput(
            pairs=tuple(zip(first, second, strict=True)),
            params=("text_1", "text_2"),
            instruction=self.instruction,
            model=self.model,
        )


def _texts_of(given: object, name: str) -> list[str]:
    if isinstance(given, str):
        return [_checked(given, name)]
    if not isinstance(given, list):
        raise invalid_field(name, "must be a string or a list of strings.")
    if not 1 <= len(given) <= MAX_PAIRS:
        raise invalid_field(name, f"must have 1 to {MAX_PAIRS} entries, not {len(given)}.")
    texts: list[str] = []
    for index, text in enumerate(given):
        texts.append(_checked(text, f"{name}.{index}"))
    return texts


def _document_text(given: object, where: str) -> str:
    if not isinstance(given, dict):
        return _checked(given, where)
    if len(given) != 1 or "text" not in given:
        # Reading each of thousands would take long.
        return _checked(read_part(DocumentObject, given, where).text, f"{where}.text")
    return _checked(given["text"], f"{where}.text")


def _checked(given: object, name: str) -> str:
    if isinstance(given, str) and given:
        return given
    raise invalid_field(name, "must be a non-empty string.")


class EmbeddingBody(Body):
    """Texts to embed."""

    ids_field: ClassVar[str | None] = "input"
    defaults: ClassVar[Defaults] = {"add_special_tokens": (True,), "priority": (0,)}
    ignored: ClassVar[Mapping[str, str]] = {"user": IGNORED["user"]}
    synonyms: ClassVar[Mapping[str, str]] = {"prompt": "input", "text": "input", "texts": "input"}

    model: str | None = model_field()
    input: Any = prompts_field(MAX_INPUTS, min_items=1)  # Any: as for a prompt
    encoding_format: Literal["float", "base64"] = described(
        "`base64` encodes little-endian 32-bit floats.", "float"
    )
    dimensions: int | None = bounds("Number of leading dimensions of the embeddings to return.", 1)
    prompt_name: str | None = described(
        "The name of one of the model's prompts, which is prepended to texts."
    )
    truncate_prompt_tokens: int | None = described(
        "Keep only this many tokens of each text, including the special tokens around it; -1 "
        "keeps as many as the model takes.",
        minimum=-1,
    )
    truncation_side: Literal["left", "right"] = described(
        "Where truncate_prompt_tokens removes tokens: `left` keeps the end of the text.", "right"
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
            raise invalid_field(
                "input", f"may have at most {MAX_INPUTS} entries, not {len(given)}."
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
    raise invalid_field(
        "input",
        "must be a string, a list of strings, a list of token ids or a list of such lists; none "
        "of them may be empty.",
    )

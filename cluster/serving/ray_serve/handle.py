"""The methods that Python programs call through a Ray Serve handle.

They translate plain arguments to the servicer's inputs, which the same validator checks.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.beam_search import check_beam_sampling, check_length_penalty
from cluster.serving.embedding_validator import MAX_PROMPTS
from cluster.serving.inputs import (
    MAX_TIMEOUT_S,
    CallOrigin,
    EmbeddingInput,
    GenerationInput,
    ScoreInput,
)
from cluster.serving.text.template_arguments import ChatPrompt
from pagedray.errors import InvalidRequestError, invalid_field
from pagedray.field_checks import MAX_COUNT, check_bool
from pagedray.sampling_params import SamplingParams
from pagedray.text import nearest_name

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from cluster.serving.auth import Tenant
    from cluster.serving.continuation import Continuation
    from cluster.serving.inputs import Prompt
    from cluster.serving.ray_serve.options import MessagePace
    from cluster.serving.server_info import ServerLoads
    from cluster.serving.servicer import EmbeddingOutput, GenerationOutput, Servicer

__all__ = ["ServeHandle"]

_BEAMS = "beam_length_penalty"
_ORIGIN = CallOrigin(frontend="ray")
_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
_TEXT_DEFAULTS = {"skip_special_tokens": True, "include_stop_str_in_output": False}
"""Parameters of `pagedray.SamplingParams` for the text."""
_OTHER_VALUES = {"detokenize": (True,), "output_kind": (0, 1)}
"""Parameters of `pagedray.SamplingParams` that have no effect here, and their allowed values."""


class ServeHandle:
    """The methods behind a handle."""

    def __init__(self, servicer: Servicer, pace: MessagePace) -> None:
        self._servicer = servicer
        self._pace = pace

    async def generate(
        self,
        prompt: Prompt | Sequence[int],
        sampling: SamplingParams | Mapping[str, object] | None,
        *,
        model: str | None,
        request_id: str | None,
        priority: int,
        timeout_s: float | None,
        key: str | None,
        beam_length_penalty: float | None = None,
        continuation: Continuation | None = None,
    ) -> AsyncGenerator[GenerationOutput]:
        """Yield new tokens of the completions, many in an output."""
        servicer = self._servicer
        with servicer.metrics.counting_rejections("ray"):
            tenant = self._tenant(key)
            read = _read_sampling(sampling)
            switches = {name: read.pop(name, value) for name, value in _TEXT_DEFAULTS.items()}
            for name, value in switches.items():
                check_bool(name, value)
            _check_text(model, "model")
            _check_text(request_id, "request_id")
            if beam_length_penalty is not None:
                check_length_penalty(beam_length_penalty, _BEAMS)
                check_beam_sampling(read, _BEAMS)
            given = GenerationInput(
                prompts=(_read_prompt(prompt),),
                sampling=read,
                beam_length_penalty=beam_length_penalty,
                skips_special_tokens=switches["skip_special_tokens"] is True,
                includes_stop=switches["include_stop_str_in_output"] is True,
                model=model,
                client_id=request_id,
                priority=_read_int(priority, "priority"),
                deadline_s=_read_deadline(timeout_s),
                tenant=tenant.name,
                origin=_ORIGIN,
                continuation=continuation,
            )
        generation = await servicer.start_generation(given)
        try:
            with self._pace.stream() as stream:
                async with aclosing(generation.outputs()) as outputs:
                    async for output in outputs:
                        yield output
                        if not output.is_last:
                            await stream.pause()
        finally:
            generation.close()

    async def embed(
        self,
        prompts: Sequence[str | Sequence[int]],
        *,
        dimensions: int | None,
        model: str | None,
        timeout_s: float | None,
        key: str | None,
    ) -> EmbeddingOutput:
        """Return the embeddings of texts."""
        with self._servicer.metrics.counting_rejections("ray"):
            _check_text(model, "model")
            given = EmbeddingInput(
                prompts=_read_texts(prompts),
                dimensions=None if dimensions is None else _read_int(dimensions, "dimensions"),
                model=model,
                deadline_s=_read_deadline(timeout_s),
                tenant=self._tenant(key).name,
                origin=_ORIGIN,
            )
        return await self._servicer.embed(given)

    async def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None,
        model: str | None,
        timeout_s: float | None,
        key: str | None,
    ) -> EmbeddingOutput:
        """Return the scores of documents as vectors of one number."""
        with self._servicer.metrics.counting_rejections("ray"):
            _check_text(model, "model")
            _check_text(instruction, "instruction")
            given = ScoreInput(
                pairs=_read_pairs(query, documents),
                params=("query", "documents"),
                instruction=instruction,
                model=model,
                deadline_s=_read_deadline(timeout_s),
                tenant=self._tenant(key).name,
                origin=_ORIGIN,
            )
        return await self._servicer.score(given)

    def loads(self, key: str | None) -> ServerLoads:
        """Return the load, with the calls that the key's tenant may see."""
        with self._servicer.metrics.counting_rejections("ray"):
            tenant = self._tenant(key)
        return self._servicer.loads(tenant)

    def tenant_name(self, key: str | None) -> str:
        """Return the name of the key's tenant. Raises AuthenticationError."""
        with self._servicer.metrics.counting_rejections("ray"):
            return self._tenant(key).name

    def _tenant(self, key: str | None) -> Tenant:
        return self._servicer.authenticate(None if key is None else f"Bearer {key}")


def _read_prompt(prompt: Prompt | Sequence[int]) -> Prompt:
    read = prompt if isinstance(prompt, ChatPrompt) else _read_text(prompt)
    if read is None:
        raise invalid_field(
            "prompt", f"must be a string, token ids or a ChatPrompt, not {type(prompt).__name__}."
        )
    return read


def _read_texts(prompts: Sequence[str | Sequence[int]]) -> tuple[str | tuple[int, ...], ...]:
    if not isinstance(prompts, list | tuple) or len(prompts) > MAX_PROMPTS:
        raise invalid_field("prompts", f"must be a list of at most {MAX_PROMPTS} texts.")
    texts = []
    for prompt in prompts:
        text = _read_text(prompt)
        if text is None:
            raise invalid_field(
                "prompts", f"must be strings or token ids, not {type(prompt).__name__}."
            )
        texts.append(text)
    return tuple(texts)


def _read_text(prompt: object) -> str | tuple[int, ...] | None:
    """Return a text or token ids; None for another type."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list | tuple) and all(type(one) is int for one in prompt):
        return tuple(prompt)
    return None


def _read_sampling(given: object) -> dict[str, object]:
    if isinstance(given, SamplingParams):
        return _fields_of(given)
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise invalid_field(
            "sampling", f"must be SamplingParams or a dictionary, not {type(given).__name__}."
        )
    for name in given:
        if name not in _SAMPLING_NAMES and name not in _TEXT_DEFAULTS:
            nearest = nearest_name(str(name), _SAMPLING_NAMES.union(_TEXT_DEFAULTS))
            hint = "." if nearest is None else f"; did you mean {nearest}?"
            raise InvalidRequestError(
                f"Unknown sampling parameter {name!r:.80}{hint}", param="sampling"
            )
    return dict(given)


def _fields_of(params: SamplingParams) -> dict[str, object]:
    """Return the fields of parameters, which may be of the Python API."""
    fields: dict[str, object] = msgspec.structs.asdict(params)
    if fields["max_tokens"] == MAX_COUNT:
        # None in the Python API: as many as fit into the context.
        del fields["max_tokens"]
    for name, allowed in _OTHER_VALUES.items():
        if (value := fields.pop(name, allowed[0])) not in allowed:
            raise invalid_field(
                name,
                f"= {value!s:.40} is not supported: outputs of a handle have the text and tokens "
                "since the previous one.",
            )
    return fields


def _read_int(given: object, param: str) -> int:
    if type(given) is not int:
        raise invalid_field(param, f"must be an integer, not {given!r:.80}.")
    return given


def _check_text(given: object, param: str) -> None:
    if given is not None and not isinstance(given, str):
        raise invalid_field(param, f"must be a string, not {given!r:.80}.")


def _read_deadline(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not (is_number and 0 < timeout_s <= MAX_TIMEOUT_S):
        raise invalid_field("timeout_s", f"must be in (0, {MAX_TIMEOUT_S}], not {timeout_s!r:.80}.")
    return time.monotonic() + timeout_s


def _read_pairs(query: object, documents: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(query, str) or not query:
        raise invalid_field("query", "must be a non-empty string.")
    if not isinstance(documents, list | tuple) or not all(
        isinstance(document, str) and document for document in documents
    ):
        raise invalid_field("documents", "must be a list of non-empty strings.")
    return tuple((query, document) for document in documents)

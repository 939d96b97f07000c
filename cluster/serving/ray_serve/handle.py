"""What Python programs in the cluster call through a Ray Serve handle.

It turns plain arguments into the servicer's words; the same validator stands behind it.
"""

from __future__ import annotations

import time
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from cluster.serving.inputs import CallOrigin, ChatPrompt, EmbeddingInput, GenerationInput
from pagedray.errors import InvalidRequestError
from pagedray.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from cluster.serving.auth.tenant import Tenant
    from cluster.serving.inputs import Prompt
    from cluster.serving.ray_serve.pace import Pace
    from cluster.serving.server_info import ServerLoads
    from cluster.serving.servicer import EmbeddingOutput, GenerationOutput, Servicer

__all__ = ["ServeHandle"]

_ORIGIN = CallOrigin(frontend="ray")
_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__)
_MAX_EMBED_PROMPTS = 2048
_MAX_TIMEOUT_S = 86_400


class ServeHandle:
    """The methods behind a handle."""

    def __init__(self, servicer: Servicer, pace: Pace) -> None:
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
    ) -> AsyncGenerator[GenerationOutput]:
        """Yield what the continuations gain, many tokens in an output."""
        servicer = self._servicer
        with servicer.metrics.counting_refusals("ray"):
            tenant = self._tenant(key)
            given = GenerationInput(
                prompts=(_read_prompt(prompt),),
                sampling=_read_sampling(sampling),
                model=model,
                client_id=request_id,
                priority=_read_priority(priority),
                deadline_s=_read_deadline(timeout_s),
                tenant=tenant.name,
                origin=_ORIGIN,
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
        """Return the vectors of texts."""
        with self._servicer.metrics.counting_refusals("ray"):
            given = EmbeddingInput(
                prompts=_read_texts(prompts),
                dimensions=dimensions,
                model=model,
                deadline_s=_read_deadline(timeout_s),
                tenant=self._tenant(key).name,
                origin=_ORIGIN,
            )
        return await self._servicer.embed(given)

    def loads(self, key: str | None) -> ServerLoads:
        """Return what there is to do, with the calls that the key's tenant may know of."""
        with self._servicer.metrics.counting_refusals("ray"):
            tenant = self._tenant(key)
        return self._servicer.loads(tenant)

    def tenant_name(self, key: str | None) -> str:
        """Return whose key it is. Raises AuthenticationError."""
        with self._servicer.metrics.counting_refusals("ray"):
            return self._tenant(key).name

    def _tenant(self, key: str | None) -> Tenant:
        return self._servicer.authenticate(None if key is None else f"Bearer {key}")


def _read_prompt(prompt: Prompt | Sequence[int]) -> Prompt:
    read = prompt if isinstance(prompt, ChatPrompt) else _read_text(prompt)
    if read is None:
        raise InvalidRequestError(
            f"prompt must be a text, token ids or a ChatPrompt, not a {type(prompt).__name__}.",
            param="prompt",
        )
    return read


def _read_texts(prompts: Sequence[str | Sequence[int]]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompts, str) or len(prompts) > _MAX_EMBED_PROMPTS:
        raise InvalidRequestError(
            f"prompts must be a list of at most {_MAX_EMBED_PROMPTS}.", param="prompts"
        )
    texts = []
    for prompt in prompts:
        text = _read_text(prompt)
        if text is None:
            raise InvalidRequestError(
                f"prompts must be texts or token ids, not a {type(prompt).__name__}.",
                param="prompts",
            )
        texts.append(text)
    return tuple(texts)


def _read_text(prompt: object) -> str | tuple[int, ...] | None:
    """Return a text or token ids; None of anything else."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list | tuple) and all(type(one) is int for one in prompt):
        return tuple(prompt)
    return None


def _read_sampling(given: SamplingParams | Mapping[str, object] | None) -> Mapping[str, object]:
    if isinstance(given, SamplingParams):
        return msgspec.structs.asdict(given)
    given = {} if given is None else given
    for name in given:
        if name not in _SAMPLING_NAMES:
            raise InvalidRequestError(f"{name!r} is not supported.", param="sampling")
    return given


def _read_priority(priority: int) -> int:
    if type(priority) is not int:
        raise InvalidRequestError(
            f"priority must be an integer, not {priority!r:.80}.", param="priority"
        )
    return priority


def _read_deadline(timeout_s: float | None) -> float | None:
    if timeout_s is None:
        return None
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s <= _MAX_TIMEOUT_S):
        raise InvalidRequestError(
            f"timeout_s must be more than 0 and at most {_MAX_TIMEOUT_S}, not {timeout_s!r:.80}.",
            param="timeout_s",
        )
    return time.monotonic() + timeout_s

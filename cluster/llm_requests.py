"""Makes requests from the prompts and parameters of the Python API."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.llm_prompts import SaltedPrompt
from cluster.sampling_params import SamplingParams, engine_fields
from cluster.serving.inputs import GenerationInput
from cluster.serving.validation.validator import Validator
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams as EngineSamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from cluster.serving.validation.embedding_validator import EmbeddingValidator
    from cluster.serving.validation.score_validator import ScoreValidator
    from pagedray.config import EngineConfig
    from pagedray.request import Request

__all__ = ["RequestMaker", "SampledPrompt", "check_params", "run_apart"]

Result = TypeVar("Result")


def check_params(given: object, kind: type[object], name: str) -> None:
    """Check that a parameter of a call is a `kind`. Raises InvalidRequestError."""
    if not isinstance(given, kind):
        raise InvalidRequestError(
            f"{name} must be {kind.__name__}, not {type(given).__name__}.", param=name
        )


@dataclass(frozen=True, slots=True)
class SampledPrompt:
    """A prompt and how its completions are sampled."""

    prompt: SaltedPrompt
    params: EngineSamplingParams
    seed: int | None
    """The seed of `params`, or else the next one of the model; None is random."""


class RequestMaker:
    """Makes requests of prompts, which have a seed each if the model was given one."""

    def __init__(
        self,
        validator: Validator | EmbeddingValidator | ScoreValidator,
        config: EngineConfig,
    ) -> None:
        # Any: values of several fields.
        self.recommended: Mapping[str, Any] = dict(config.sampling_defaults)
        """The fields of parameters that the model's file sets."""
        self.default_params = SamplingParams(**self.recommended)
        """The parameters of requests without any: those that the model's file recommends."""
        self._validator = validator
        self._seeds = None if config.seed is None else random.Random(config.seed)

    def text_validator(self) -> Validator:
        """Return the validator. Raises InvalidRequestError if the model does not generate text."""
        if not isinstance(self._validator, Validator):
            raise InvalidRequestError("The model does not generate text; use embed() or score().")
        return self._validator

    # Any: what a caller gave.
    def sample(self, prompts: Sequence[SaltedPrompt], params: Any) -> list[SampledPrompt]:
        """Return the prompts of a call with their parameters. Raises InvalidRequestError."""
        seeds = self._seeds
        return [
            SampledPrompt(
                prompt,
                one,
                seeds.randrange(2**63) if seeds is not None and one.seed is None else one.seed,
            )
            for prompt, one in zip(prompts, self._params_of(params, len(prompts)), strict=True)
        ]

    # Any: what a caller gave.
    def _params_of(self, given: Any, num_prompts: int) -> Sequence[EngineSamplingParams]:
        """Return the parameters of each prompt. Raises InvalidRequestError."""
        if given is None or isinstance(given, EngineSamplingParams):
            return [given or self.default_params] * num_prompts
        params = given if isinstance(given, Sequence) else [given]
        for one in params:
            check_params(one, EngineSamplingParams, "sampling_params")
        if len(params) != num_prompts:
            raise InvalidRequestError(
                f"sampling_params must have one entry per prompt, {num_prompts}, not "
                f"{len(params)}.",
                param="sampling_params",
            )
        return params

    async def make(self, prompts: Sequence[SampledPrompt]) -> list[Request]:
        """Return a request for each prompt. Raises InvalidRequestError."""
        validator = self.text_validator()
        requests: list[Request] = []
        for one in prompts:
            given = GenerationInput(
                prompts=(one.prompt.value,),
                sampling=engine_fields(one.params) | {"seed": one.seed},
                cache_salt=one.prompt.salt,
            )
            requests += await validator.validate(given)
        return requests


def run_apart(work: Coroutine[None, None, Result]) -> Result:
    """Return the result of a coroutine, which runs in a new thread.

    The caller's thread may have a running event loop, as in a notebook.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()

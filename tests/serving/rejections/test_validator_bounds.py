"""The bounds of what the validator accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.inputs import GenerationInput
from cluster.serving.validation.validator import Validator
from pagedray.errors import InvalidRequestError
from pagedray.sampling_params import SamplingParams
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from cluster.serving.text.tokenizer import Tokenizer


@pytest.mark.parametrize("client_id", ["", "x" * 129, "a\nb", "a\x00", "\u200b"])
async def test_ids_are_short_and_printable(tokenizer: Tokenizer, client_id: str) -> None:
    validator = Validator(engine_config(), tokenizer)
    with pytest.raises(InvalidRequestError, match="1 to 128 printable"):
        await validator.validate(GenerationInput(prompts=("x",), client_id=client_id))


@pytest.mark.parametrize("given", ["a\ud800", "\udfffb"])
async def test_lone_surrogates_are_rejected(tokenizer: Tokenizer, given: str) -> None:
    validator = Validator(engine_config(), tokenizer)
    for one in (
        GenerationInput(prompts=(given,)),
        GenerationInput(prompts=("x",), sampling={"stop": (given,)}),
    ):
        with pytest.raises(InvalidRequestError, match="lone surrogate"):
            await validator.validate(one)


async def test_bounds_are_inclusive(tokenizer: Tokenizer) -> None:
    validator = Validator(engine_config(), tokenizer)
    (request,) = await validator.validate(
        GenerationInput(
            prompts=((319,) * 255,),
            client_id="x" * 128,
            priority=-(2**31),
            sampling={
                "n": 128,
                "max_tokens": 1,
                "logprobs": 20,
                "stop": ("x" * 512,) * 16,
                "logit_bias": dict.fromkeys(range(320), 100.0),
                "seed": 2**63 - 1,
            },
        )
    )
    assert isinstance(request.sampling, SamplingParams)
    assert len(request.id) == 32
    assert request.seed == 2**63 - 1

"""The checks of sampling parameters that need no model."""

from __future__ import annotations

from typing import Any

import pytest

from pagedray.errors import InvalidRequestError
from pagedray.field_checks import check_token_ids
from pagedray.sampling_params import SamplingParams


def test_reported_tokens_require_logprobs() -> None:
    with pytest.raises(InvalidRequestError, match="logprob_token_ids requires logprobs"):
        SamplingParams(logprob_token_ids=[5])


@pytest.mark.parametrize("wrong", [-1, 2**31, True, 1.5, "a"])
def test_reported_tokens_are_token_ids(wrong: int) -> None:
    with pytest.raises(InvalidRequestError, match="logprob_token_ids must be"):
        SamplingParams(logprobs=1, logprob_token_ids=[3, wrong])


@pytest.mark.parametrize("name", ["allowed_token_ids", "logprob_token_ids", "stop_token_ids"])
@pytest.mark.parametrize(
    "wrong", [5, "ab", b"ab", {1: 1}, iter([1])], ids=lambda one: type(one).__name__
)
def test_token_ids_are_a_list(name: str, wrong: object) -> None:
    given: Any = {name: wrong}
    with pytest.raises(InvalidRequestError, match=f"{name} must be a list of integers"):
        SamplingParams(logprobs=1, **given)


@pytest.mark.parametrize("wrong", ["no", 1, 0.0, None, []], ids=lambda one: type(one).__name__)
def test_booleans_are_no_other_values(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="ignore_eos must be true or false, not"):
        SamplingParams(ignore_eos=wrong)


@pytest.mark.parametrize("wrong", [5, "ab", [1], {1}], ids=lambda one: type(one).__name__)
def test_biases_are_a_dictionary(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias must be a dictionary"):
        SamplingParams(logit_bias=wrong)


@pytest.mark.parametrize("ids", [[], [0], [0, 9, 4], list(range(10)) * 100])
def test_ids_of_the_vocabulary_pass(ids: list[int]) -> None:
    check_token_ids(ids, 10, "prompt")


@pytest.mark.parametrize(
    "wrong", [-1, 10, 10**5000, True, 1.5, "a", None], ids=lambda one: type(one).__name__
)
def test_invalid_ids_are_named(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt (must )?contains?"):
        check_token_ids([3, wrong], 10, "prompt")

"""The order of validation: the most expensive step is last."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from cluster.serving.inputs import GenerationInput
from cluster.serving.validator import Validator
from pagedray.errors import ContextLengthError, InvalidRequestError, RequestError
from pagedray.request import Structure
from tests.serving.conftest import engine_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cluster.serving.text.tokenizer import Tokenizer


@pytest.fixture
def compiled_s() -> list[float]:
    """How long calls waited for their structures."""
    return []


@pytest.fixture
def validator(tokenizer: Tokenizer, compiled_s: list[float]) -> Iterator[Validator]:
    validator = Validator(
        engine_config(16), tokenizer, note_compile=lambda _, took_s: compiled_s.append(took_s)
    )
    yield validator
    validator.close()


@pytest.mark.parametrize(
    ("prompt", "error"),
    [("the quick fox " * 40, ContextLengthError), ("", InvalidRequestError)],
)
async def test_prompts_are_read_before_a_structure_is_compiled(
    validator: Validator, compiled_s: list[float], prompt: str, error: type[RequestError]
) -> None:
    # It would be rejected as well.
    structure = Structure(kind="regex", text="(?=a)")
    given = GenerationInput(prompts=("the", prompt), sampling={"structure": structure})
    with pytest.raises(error) as caught:
        await validator.validate(given)
    assert getattr(caught.value, "param", None) == "prompt"
    assert compiled_s == []
    given = GenerationInput(prompts=("the",), sampling={"structure": structure})
    with pytest.raises(InvalidRequestError) as caught:
        await validator.validate(given)
    assert caught.value.param == "structure"
    assert len(compiled_s) == 1

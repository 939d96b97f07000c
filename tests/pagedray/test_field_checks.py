"""The checks of token ids."""

from __future__ import annotations

import pytest

from pagedray.errors import InvalidRequestError
from pagedray.field_checks import check_token_ids


@pytest.mark.parametrize("ids", [[], [0], [0, 9, 4], list(range(10)) * 100])
def test_ids_of_the_vocabulary_pass(ids: list[int]) -> None:
    check_token_ids(ids, 10, "prompt")


@pytest.mark.parametrize(
    "wrong", [-1, 10, 10**5000, True, 1.5, "a", None], ids=lambda one: type(one).__name__
)
def test_invalid_ids_are_named(wrong: object) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt (must )?contains?"):
        check_token_ids([3, wrong], 10, "prompt")

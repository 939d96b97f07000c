"""The arguments of calls are JSON objects of finite numbers."""

from __future__ import annotations

import pytest

from cluster.serving.json_bodies.call_arguments import read_arguments
from pagedray.errors import InvalidRequestError

HUGE = "9" * 308


def test_arguments_are_read() -> None:
    assert read_arguments("", "arguments") == {}
    text = '{"a": "1e400", "b": [1e308, -1.7E+308, 1e-400, 0e400], "c": %s}' % (HUGE * 2)
    expected = {"a": "1e400", "b": [1e308, -1.7e308, 0.0, 0.0], "c": int(HUGE * 2)}
    assert read_arguments(text, "arguments") == expected


@pytest.mark.parametrize(
    "number", ["1e400", "-1E+400", "1.5e999", f"{HUGE}9.5", f"-{HUGE}.0e1", f"{HUGE}99.5e-1"]
)
@pytest.mark.parametrize("text", ['{"a": %s}', '{"a": [true, {"b": [%s]}], "c": 1.0}'])
def test_numbers_beyond_a_double_are_rejected(text: str, number: str) -> None:
    expected = r"^arguments has a number that exceeds the range of a double\.$"
    with pytest.raises(InvalidRequestError, match=expected):
        read_arguments(text % number, "arguments")


@pytest.mark.parametrize("text", ["[1]", "null", "{", '{"a": NaN}', '{"a": Infinity}'])
def test_other_texts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^arguments must be a JSON object as a string"):
        read_arguments(text, "arguments")

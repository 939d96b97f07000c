"""The arguments of calls are JSON objects of finite numbers."""

from __future__ import annotations

import json

import pytest

from cluster.serving.json_body import read_arguments
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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, {}) for text in ("null", " null\n", '""', "{", '{"a', '{"a"', '{"a":')),
        ('{"a": tr', {}),
        ('{"a": 1, "b": [2, {"c": "x', {"a": 1, "b": [2, {"c": "x"}]}),
        ('{"a": "x\\', {"a": "x"}),
        ('{"a": "x\\u00', {"a": "x"}),
        ('{"a": 1, "a": 2}', {"a": 2}),
        (r'{"a": "x\ud83d"}', {"a": "x\ufffd"}),
        (r'{"\uDE00": ["\ud83d\ude00", "\ude00\ud83d", "\\ud83d", "\n"]}',
         {"\ufffd": ["\U0001f600", "\ufffd\ufffd", "\\ud83d", "\n"]}),
        (r'{"a": "\ud83d", "b": "x', {"a": "\ufffd", "b": "x"}),
        (f'{{"a": {"[" * 150}1{"]" * 150}}}', None),
    ],
)  # fmt: skip
def test_arguments_that_a_response_may_have_are_read(
    text: str, expected: dict[str, object] | None
) -> None:
    found = read_arguments(text, "arguments")
    assert found == (json.loads(text) if expected is None else expected)


@pytest.mark.parametrize(
    "text",
    [
        *("[1]", "nul", "5", '"x"', "{'a': 1}", '{"a": NaN}', '{"a": Infinity}', '{"a": 1} x'),
        *('{"a" 1', '{"a": 1]', "[", '"{', r'{"a": "\ud83d", b}', r"\ud83d"),
    ],
)
def test_other_texts_are_rejected(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^arguments must be a JSON object as a string"):
        read_arguments(text, "arguments")

"""Regular expressions have the meaning they have in Python, or are rejected."""

from __future__ import annotations

import json
import re

import pytest

from cluster.structured.grammar.expressions import MAX_OPTIONAL_RUN, optional_run_of
from cluster.structured.grammar.json_schema import read_json_schema
from cluster.structured.grammar.regex import read_regex
from pagedray.errors import InvalidRequestError
from tests.structured.grammar.as_regex import as_regex

TEXTS = [
    *(
        "",
        "A",
        "B",
        "AB",
        "Ab",
        "aB",
        "ABC",
        "abc",
        "aBC",
        "\u017f",
        "\u212a",
        "a",
        "b",
        "ab",
        "abc",
        "aab",
        "abab",
        "x\n",
        "\n",
        "\r",
        "7",
        "42",
        "4-2",
        " ",
        "\t",
    ),
    *("\u00a0", "\u2003", "\u00e9", "_", "a$", "^a", "]", "\\", ".", "aaa", "aaaa", "\ufeff", '"'),
]


@pytest.mark.parametrize(
    "pattern",
    [
        *("^ab$", "a|b|", "(?:ab)+?", "a{2,3}", "a{2,}", "[^a]", "[a-]", r"[\]\\]", r"\.", ""),
        *(r"\d+", r"\w*", r"\s", "(a|b)*c?", r"[\d\-]+", r"\x61\u0062", r"a\$", "^a|b$", r"\\"),
        *("(?i:aB[b-c]?)", "(?i:[^B])", "a(?i:(?:b))", "(?i:a)b"),
        *(r"[^\s]", r"[\w.]", r"\n", "a{0}", "(((a)))", "[^\\n]", r'"'),
    ],
)
def test_the_same_texts_match(pattern: str) -> None:
    ours = re.compile(as_regex(read_regex(pattern)))
    theirs = re.compile(pattern, re.ASCII)
    for text in TEXTS:
        if ours.fullmatch(text):
            assert theirs.fullmatch(text), text
        # Whitespace and line ends that only one of the languages has are excluded from both.
        elif not set(text) & {"\u00a0", "\u2003", "\ufeff"}:
            assert not theirs.fullmatch(text), text


@pytest.mark.parametrize("pattern", [".", r"\S", r"[^\S]", r"\W", r"\D"])
def test_classes_hold_no_more_than_in_python(pattern: str) -> None:
    ours = re.compile(as_regex(read_regex(pattern)))
    for code_point in [*range(0x3000), 0xFEFF, 0x10FFFF]:
        if ours.fullmatch(chr(code_point)):
            assert re.fullmatch(pattern, chr(code_point), re.ASCII)


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "(?=a)",
            "(?!a)",
            "(?<=a)b",
            "(?P<n>a)",
            "(?i)a",
            r"(a)\1",
            r"\ba",
            r"\B",
            r"\A",
            r"\p{L}",
        ),
        *("a^b", "a$b", "(^a)", "a**", "a++", "a{2}{3}", "*a", "(", ")", "a)", "[", "[]", "[z-a]"),
        *(
            "[a-\\d]",
            "{",
            "a{x}",
            "a{3,2}",
            "a{2000}",
            "\\",
            r"\x4",
            r"\ud800",
            r"\udfff",
            # As int() would read them.
            r"\x4_",
            r"\u+123",
            r"\u1_23",
            r"\_",
            "\x00",
            "[[:alpha:]]",
        ),
        *("(" * 100 + ")" * 100, "a" * 5000),
    ],
)
def test_unsupported_expressions_are_rejected(pattern: str) -> None:
    with pytest.raises(
        InvalidRequestError, match="structure has an unsupported regular expression: "
    ) as caught:
        read_regex(pattern)
    assert caught.value.param == "structure"


@pytest.mark.parametrize(
    "count", ["1001", "99999999", "9" * 4000, "0,1001", "1," + "9" * 4000, "00001001"]
)
def test_counts_above_the_maximum_are_named(count: str) -> None:
    with pytest.raises(InvalidRequestError, match="repeat count above the maximum of 1000"):
        read_regex(f"a{{{count}}}")


def test_counts_may_begin_with_zeros() -> None:
    assert read_regex("a{0000000002,00000000003}") == read_regex("a{2,3}")


@pytest.mark.parametrize(
    ("text", "length"),
    [
        *(("abc", 0), ("a?", 1), ("a?b?c?", 3), ("a?bc?d?", 2), ("a*b*", 2), ("(?:a|)(?:b|)", 2)),
        *(("(?:a?b?)c?", 3), ("(?:a?b?){5}", 10), ("(?:a?b?){2,}", 6), ("(?:a?){2,7}", 7)),
        *(("(?:a?bc?){9}", 2), ("(?:a?b){9}", 1), ("x(?:a?|bc?)y?", 2), ("(?:ab)?", 1)),
        *(("(?:a(?:b?c?)d)?e?", 2), ("a{0,9}", 1), ("a{2,9}", 0), ("", 0)),
    ],
)
def test_optional_parts_in_a_row_are_counted(text: str, length: int) -> None:
    assert optional_run_of(read_regex(text)) == length


@pytest.mark.parametrize("text", ["a?" * 2000, "(?:a?){900}", "(?:a|)" * 600])
def test_too_many_optional_parts_are_rejected(text: str) -> None:
    message = rf"\d+ optional parts in a row, more than the maximum of {MAX_OPTIONAL_RUN}\."
    with pytest.raises(InvalidRequestError, match=message):
        read_regex(text)


@pytest.mark.parametrize(
    ("num_required", "num_optional", "limit"),
    [
        (257, 0, r"256 properties\."),
        (0, 129, r"128 properties that are not required\."),
        (200, 57, r"256 properties\."),
    ],
)
def test_objects_of_too_many_properties_are_rejected(
    num_required: int, num_optional: int, limit: str
) -> None:
    names = [f"p{index}" for index in range(num_required + num_optional)]
    schema = {
        "type": "object",
        "properties": {key: {"type": "null"} for key in names},
        "required": names[:num_required],
    }
    with pytest.raises(InvalidRequestError, match=f"#/properties must have at most {limit}"):
        read_json_schema(json.dumps(schema))

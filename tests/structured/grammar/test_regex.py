"""Regular expressions have the meaning they have in Python, or are rejected."""

from __future__ import annotations

import re

import pytest

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

"""The words that `scripts/check` counts are found in docstrings and comments, and only there."""

from __future__ import annotations

import pytest

from scripts.words import counted_words, prose_of

_SOURCE = '''
"""Return those blocks."""

what = "what those are"  # Whose blocks.


def first(block: int) -> int:
    """Return the first
    block."""
    # type: ignore[those]
    # Adjacent lines
    # are one text.
    return block
'''


def test_prose_is_docstrings_and_comments() -> None:
    assert sorted(prose_of(_SOURCE)) == [
        (2, "Return those blocks."),
        (4, "Whose blocks."),
        (8, "Return the first block."),
        (11, "Adjacent lines are one text."),
    ]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Those of a block.", "those"),
        ("Return what it needs.", "what-clauses"),
        ("Another one takes it.", "one as a pronoun"),
        ("The last one.", "one as a pronoun"),
        ("Blocks whose content is kept.", "whose"),
    ],
)
def test_each_word_is_counted(text: str, name: str) -> None:
    _, found = counted_words([text])
    assert +found == {name: 1}


@pytest.mark.parametrize(
    "text",
    ["What is a block?", "At least one token.", "One of the ranks.", "Read one by one."],
)
def test_questions_and_numerals_are_not_counted(text: str) -> None:
    _, found = counted_words([text])
    assert not +found

"""The end of a model's reasoning, against the tokens that a model without masks would choose."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.structured.token_matchers import FreeMatcher, ReasoningBudget, TokenIndex
from pagedray.request import Reasoning

TEXTS = ("", "<think>", "</think>", "</", "think", ">", "a", "b", "\n", "t")
EOS, BEGIN, END, A, B = 0, 1, 2, TEXTS.index("a"), TEXTS.index("b")
WHOLE_MARKS = Reasoning(
    begin="<think>", end="</think>", mark_tokens=((BEGIN, "<think>"), (END, "</think>"))
)
SPLIT_MARKS = Reasoning(begin="<think>", end="</think>")


def written(reasoning: Reasoning, chosen: list[int], *, max_tokens: int) -> str:
    """Return the text of a model that chooses these tokens wherever its mask allows them."""
    special = {text: token_id for token_id, text in reasoning.mark_tokens}
    tokens = [b"" if text in special else text.encode() for text in TEXTS]
    if not special:
        # Otherwise the mark is one token.
        tokens[END] = b""
    index = TokenIndex(tokens, special)
    matcher = ReasoningBudget(FreeMatcher(), reasoning, index, max_tokens=max_tokens)
    texts = []
    for wanted in chosen:
        masks = np.zeros((1, 1), dtype=np.int32)
        matcher.write_mask(masks, 0)
        allowed = np.flatnonzero(np.unpackbits(masks[0].view(np.uint8), bitorder="little"))
        token_id = wanted if wanted in allowed else int(allowed[0])
        assert matcher.accept_token(token_id)
        texts.append(TEXTS[token_id])
    return "".join(texts)


@pytest.mark.parametrize(
    ("max_tokens", "text"),
    [
        (0, "<think></think>aaaa"),
        (1, "<think>a</think>aaa"),
        (3, "<think>aaa</think>a"),
        (4, "<think>aaaa</think>"),
        (5, "<think>aaaaa"),
    ],
)
def test_reasoning_ends_after_its_tokens(max_tokens: int, text: str) -> None:
    assert written(WHOLE_MARKS, [BEGIN, *[A] * 5], max_tokens=max_tokens) == text


def test_mark_of_several_tokens_is_written_as_a_whole() -> None:
    assert written(SPLIT_MARKS, [BEGIN, *[A] * 6], max_tokens=2) == "<think>aa</think>a"
    # The model began the mark itself.
    begun = [BEGIN, A, TEXTS.index("</"), B, B, B]
    assert written(SPLIT_MARKS, begun, max_tokens=2) == "<think>a</think>b"


def test_token_of_the_mark_follows_a_part_of_it() -> None:
    begun = [BEGIN, A, TEXTS.index("</"), B, B]
    assert written(WHOLE_MARKS, begun, max_tokens=2) == "<think>a</</think>b"


def test_reasoning_may_begin_in_the_prompt() -> None:
    reasoning = Reasoning(
        begin="<think>", end="</think>", mark_tokens=((END, "</think>"),), is_open=True
    )
    assert written(reasoning, [A] * 4, max_tokens=2) == "aa</think>a"


@pytest.mark.parametrize("chosen", [[A] * 6, [BEGIN, A, END, *[B] * 5], [EOS, A]])
def test_other_tokens_are_free(chosen: list[int]) -> None:
    text = "".join(TEXTS[one] for one in chosen)
    assert written(WHOLE_MARKS, chosen, max_tokens=1) == text


@pytest.mark.parametrize(
    ("token_ids", "is_free"),
    [([], False), ([BEGIN, A], False), ([BEGIN, A, END], True), ([A], True)],
)
def test_all_tokens_are_allowed_once_no_reasoning_follows(
    token_ids: list[int], is_free: bool
) -> None:
    index = TokenIndex([text.encode() for text in TEXTS], {"<think>": BEGIN, "</think>": END})
    matcher = ReasoningBudget(FreeMatcher(), WHOLE_MARKS, index, max_tokens=3)
    for token_id in token_ids:
        assert matcher.accept_token(token_id)
    assert matcher.is_free == is_free


def test_a_turn_may_begin_again() -> None:
    index = TokenIndex([text.encode() for text in TEXTS], {})
    matcher = ReasoningBudget(FreeMatcher(), SPLIT_MARKS, index, max_tokens=1)
    for _ in range(2):
        for token_id in (BEGIN, A):
            masks = np.zeros((1, 1), dtype=np.int32)
            matcher.write_mask(masks, 0)
            assert masks[0, 0] == -1
            matcher.accept_token(token_id)
        masks = np.zeros((1, 1), dtype=np.int32)
        matcher.write_mask(masks, 0)
        assert masks[0, 0] == 1 << END
        matcher.reset()

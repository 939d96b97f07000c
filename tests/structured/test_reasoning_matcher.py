"""A grammar that applies behind the model's reasoning, against its text and Python's re."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from cluster.structured.grammar.grammar_text import grammar_text
from cluster.structured.token_matchers import ReasoningMatcher, Vocabulary
from cluster.structured.xgrammar_library import XGrammarLibrary
from pagedray.request import AnswerHeader, Reasoning
from pagedray.sampling_params import Structure

EOS, BEGIN, END = 0, 1, 2
TEXTS = (
    *("", "<think>", "</think>", "<", "</", "think", ">", ">\n\n", ">{", "/", "\n", "\n\n"),
    *("a", "b", "{", "}", "x</think>a", "thi", "nk", "</think>\n", "k>", "<a"),
)
REASONING = Reasoning(begin="<think>", end="</think>")
SPECIAL = Reasoning(
    begin="<think>",
    end="</think>",
    mark_tokens=((BEGIN, "<think>"), (END, "</think>")),
    has_special_tokens=True,
)


@pytest.fixture(scope="module", params=["text", "special"])
def library(request: pytest.FixtureRequest) -> tuple[XGrammarLibrary, Reasoning]:
    is_special = request.param == "special"
    tokens = [text.encode() for text in TEXTS]
    if is_special:
        tokens[BEGIN] = tokens[END] = b""
    special = {"<think>": BEGIN, "</think>": END} if is_special else {}
    vocabulary = Vocabulary(tokens=tuple(tokens), eos_token_ids=(EOS,), special_token_ids=special)
    return XGrammarLibrary(vocabulary), SPECIAL if is_special else REASONING


def written(
    found: tuple[XGrammarLibrary, Reasoning],
    *,
    is_open: bool,
    pattern: str,
    seed: int,
    headers: tuple[AnswerHeader, ...] = (),
    num_prompt_tokens: int = 0,
) -> str:
    """Return a random text that the masks allow, up to its end."""
    library, marks = found
    text = grammar_text(Structure(kind="regex", text=pattern))
    compiled, _ = library.compile_grammar(text)
    reasoning = Reasoning(
        begin=marks.begin,
        end=marks.end,
        mark_tokens=marks.mark_tokens,
        is_open=is_open,
        answer_headers=headers,
        num_prompt_tokens=num_prompt_tokens,
    )
    matcher = ReasoningMatcher(
        library.matcher(compiled), reasoning, library.index, eos_token_ids=(EOS,)
    )
    generator = random.Random(seed)
    output = ""
    for _ in range(2000):
        masks = np.zeros((1, library.num_mask_words), dtype=np.int32)
        matcher.write_mask(masks, 0)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        assert not bits[library.vocab_size :].any()
        allowed = np.flatnonzero(bits).tolist()
        chosen = generator.choice(allowed)
        if chosen == EOS:
            return output
        assert matcher.accept_token(chosen), (output, TEXTS[chosen])
        output += TEXTS[chosen]
    raise AssertionError("The text does not end.")


@pytest.mark.parametrize("is_open", [False, True])
def test_structure_follows_the_reasoning(
    library: tuple[XGrammarLibrary, Reasoning], is_open: bool
) -> None:
    seen = set()
    for seed in range(200):
        text = written(library, is_open=is_open, pattern=r"\{[ab]{1,3}\}", seed=seed)
        begin = "" if is_open else "\n?<think>"
        found = re.fullmatch(rf"(?s:{begin}(.*?)</think>)?\n?\n?(\{{[ab]{{1,3}}\}})", text)
        assert found is not None, text
        seen.add(found[1] is not None)
    assert seen == ({True} if is_open else {False, True})


def test_structure_may_begin_like_a_mark(library: tuple[XGrammarLibrary, Reasoning]) -> None:
    seen = set()
    for seed in range(200):
        text = written(library, is_open=False, pattern="<(a|thi)b", seed=seed)
        found = re.fullmatch(r"(?s:\n?<think>.*?</think>\n?\n?)?(<(a|thi)b)", text)
        assert found is not None, text
        seen.add((text.startswith("<think>"), found[2]))
    assert seen == {(False, "a"), (False, "thi"), (True, "a"), (True, "thi")}


def test_sequence_cannot_end_inside_the_reasoning(
    library: tuple[XGrammarLibrary, Reasoning],
) -> None:
    for seed in range(50):
        assert "</think>" in written(library, is_open=True, pattern="a", seed=seed)


HEADERS = {("think", ">", "/"): "a", ("think", ">", "a"): "", ("think", "/"): "ba"}


def test_a_header_precedes_the_structure_and_chooses_its_text(
    library: tuple[XGrammarLibrary, Reasoning],
) -> None:
    headers = tuple(
        AnswerHeader(tuple(map(TEXTS.index, words)), text) for words, text in HEADERS.items()
    )
    seen = set()
    for seed in range(200):
        # Without reasoning, the prompt has the beginning of the header.
        text = written(
            library,
            is_open=False,
            pattern="[ab]{3}",
            seed=seed,
            headers=headers,
            num_prompt_tokens=1,
        )
        found = re.fullmatch(
            r"(?s:(?P<thought>\n?<think>.*?</think>\n?\n?think)?(?P<header>>/|>a|/)\n?\n?)([ab]*)",
            text,
        )
        assert found is not None, text
        chosen = {"".join(words[1:]): text for words, text in HEADERS.items()}[found["header"]]
        assert len(chosen + found[3]) == 3
        seen.add((found["thought"] is None, found["header"]))
    assert len(seen) == 6

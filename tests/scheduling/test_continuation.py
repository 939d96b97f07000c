"""Requests that continue from tokens that another replica generated."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pagedray.errors import InvalidRequestError, OverloadedError
from pagedray.request import FinishReason
from tests.scheduling.fake_worker import undisturbed
from tests.scheduling.harness import Harness

PROMPT = (1, 2, 4, 5, 6)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a_request_cut_anywhere_ends_with_the_same_tokens(block_size: int) -> None:
    for cut in range(12):
        harness = Harness(block_size=block_size, max_num_batched_tokens=7)
        whole = _tokens_of(seed=5, n=1, max_tokens=12)[0]
        harness.add(PROMPT, seed=5, max_tokens=12, generated=[tuple(whole[:cut])])
        harness.drain()
        assert harness.results.tokens == {("request-5", 0): whole}


def test_sequences_continue_from_different_tokens_and_ended_ones_do_not_run() -> None:
    random_cuts = random.Random(0)
    for _ in range(30):
        whole = _tokens_of(seed=7, n=4, max_tokens=9)
        generated = [tuple(one[: random_cuts.randrange(9)]) for one in whole]
        ended = random_cuts.randrange(4)
        harness = Harness(max_num_seqs=3, num_blocks=16, max_num_batched_tokens=6)
        given = [None if index == ended else one for index, one in enumerate(generated)]
        request_id = harness.add(PROMPT, seed=7, n=4, max_tokens=9, generated=given)
        harness.drain()
        open_indices = [index for index in range(4) if index != ended]
        assert harness.results.tokens == {
            (request_id, index): whole[index] for index in open_indices
        }
        assert all(event.num_cached_tokens <= len(PROMPT) for event in harness.results.events)


def test_a_stop_token_and_min_tokens_count_from_the_prompt() -> None:
    whole = _tokens_of(seed=3, n=1, max_tokens=20)[0]
    stop = whole[6]
    first = whole.index(stop)
    for min_tokens in (0, first + 1, first + 2):
        options: dict[str, Any] = {  # Any: arguments of several types
            "max_tokens": 20,
            "min_tokens": min_tokens,
            "stop_token_ids": [stop],
        }
        plain = Harness()
        plain.add(PROMPT, seed=3, **options)
        plain.drain()
        cut = Harness()
        cut.add(PROMPT, seed=3, generated=[tuple(whole[:first])], **options)
        cut.drain()
        assert cut.results.tokens == plain.results.tokens
        assert cut.results.reasons == plain.results.reasons


def test_a_continued_request_is_admitted_to_a_full_queue() -> None:
    harness = Harness(max_queued_requests=1)
    harness.add(PROMPT)
    with pytest.raises(OverloadedError):
        harness.add(PROMPT)
    tokens = _tokens_of(seed=1, n=1, max_tokens=8)[0]
    harness.add(PROMPT, seed=1, generated=[tuple(tokens[:3])])
    harness.drain()
    assert set(harness.results.reasons.values()) == {FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"generated": [(1,)], "n": 2}, "n = 2 cannot continue from the tokens of 1 sequence,"),
        ({"generated": [None, None], "n": 2}, ", 0 unfinished"),
        ({"generated": [(1,) * 8]}, "after 8 generated tokens: it ends after 8"),
        ({"generated": [(1,) * 95], "max_tokens": 500}, "it ends after 95"),
        ({"generated": [(5, -1, 5)]}, "Token ids must be from 0"),
        ({"generated": [(5, 2**31, 5)]}, "Token ids must be from 0"),
    ],
)
# Any: arguments of several types.
def test_what_cannot_continue_is_rejected(options: dict[str, Any], text: str) -> None:
    harness = Harness()
    with pytest.raises(InvalidRequestError, match=text):
        harness.add(PROMPT, **options)
    assert not harness.scheduler.has_work


def test_a_continued_request_survives_the_death_of_its_ranks() -> None:
    whole = _tokens_of(seed=2, n=2, max_tokens=9)
    harness = Harness()
    given = [tuple(whole[0][:4]), ()]
    request_id = harness.add(PROMPT, seed=2, n=2, max_tokens=9, generated=given)
    harness.step()
    harness.step()
    harness.replace_worker()
    harness.drain()
    assert harness.results.tokens == {(request_id, index): whole[index] for index in range(2)}


def _tokens_of(*, seed: int, n: int, max_tokens: int) -> list[list[int]]:
    """Return the tokens of each sequence of an undisturbed request."""
    harness = Harness()
    request_id = harness.add(PROMPT, seed=seed, n=n, max_tokens=max_tokens)
    request = harness.requests[request_id]
    return [
        undisturbed(request, index, max_model_len=100, bad_length=None)[0] for index in range(n)
    ]

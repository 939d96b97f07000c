"""Guesses of suffix decoding are those of a search of all places, within a tenant."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from cluster.scheduling.sequence import ActiveRequest
from cluster.scheduling.speculation import Speculator
from cluster.scheduling.suffix_decoding import _OWN_SIZES, PastAnswers, SuffixDrafter
from pagedray.config import SpeculationConfig
from pagedray.errors import StartupError
from pagedray.request import Request
from pagedray.sampling_params import SamplingParams
from tests.scheduling.drafting import FreeDrafts
from tests.scheduling.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Sequence as AnySequence

    from cluster.scheduling.sequence import Sequence

DEPTH = 8
CONFIG = SpeculationConfig(
    method="suffix",
    num_speculative_tokens=8,
    suffix_decoding_max_tree_depth=DEPTH,
    suffix_decoding_max_spec_factor=1.5,
    suffix_decoding_min_token_prob=0.3,
)


def sequence_of(
    prompt: AnySequence[int], answer: AnySequence[int] = (), *, tenant: str = "", salt: str = ""
) -> Sequence:
    """Return a sequence with a prompt and generated tokens."""
    request = Request(
        id="any",
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=1000),
        seed=0,
        tenant=tenant,
        cache_salt=salt,
        generated_token_ids=(tuple(answer),),
    )
    harness = Harness()
    tokens = harness.scheduler.prepare_prompt(request).token_ids
    return ActiveRequest(request, prompt=tokens, arrival=0, max_model_len=2000).sequences[0]


def chosen(followed: list[list[int]], limit: int) -> tuple[list[int], float]:
    """Return the most frequent tokens of what followed at places, and how many may be right."""
    guesses, score, probability = list[int](), 0.0, 1.0
    while len(guesses) < limit:
        counts = Counter(one[0] if one else None for one in followed)
        best = max(counts.values())
        # Of equally frequent tokens, the last is preferred.
        token = next(key for key in counts if counts[key] == best)
        probability *= best / len(followed)
        if token is None or probability < CONFIG.suffix_decoding_min_token_prob:
            break
        guesses.append(token)
        score += probability
        followed = [one[1:] for one in followed if one and one[0] == token]
    return guesses, score


def expected(tokens: list[int], answers: list[list[int]], limit: int) -> list[int]:
    """Return the guesses for a sequence after answers, which have tokens of their prompts."""
    guesses, score = list[int](), 0.0
    for size in reversed([one for one in _OWN_SIZES if one <= DEPTH]):
        ends = [
            end
            for end in range(len(tokens) - 1, size - 1, -1)
            if tokens[end - size : end] == tokens[len(tokens) - size :]
        ]
        if ends:
            followed = [tokens[end:] * limit for end in ends]
            guesses, score = chosen(followed, min(limit, int(1.5 * size)))
            break
    for size in range(min(DEPTH, len(tokens)), 2, -1):
        found = [
            answer[end:]
            for answer in reversed(answers)
            for end in range(len(answer), size - 1, -1)
            if answer[end - size : end] == tokens[len(tokens) - size :]
        ]
        if found:
            others, other_score = chosen(found, min(limit, int(1.5 * size)))
            return others if other_score > score else guesses
    return guesses


@pytest.mark.parametrize("seed", range(4))
def test_guesses_are_those_of_a_search_of_all_places(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.scheduling.suffix_decoding._MAX_PLACES", 10_000)
    monkeypatch.setattr("cluster.scheduling.suffix_decoding._FIRST_TABLE_SIZE", 4)
    rng = random.Random(seed)
    drafter = SuffixDrafter(CONFIG)
    answers: list[list[int]] = []
    num_guessed = num_past = 0
    for _ in range(150):
        # Large ids, of which bytes repeat at other offsets, and 0.
        choices = rng.choice(([1, 256, 65536, 0], [0, 1], [7 * 257, 7 * 65793, 2**31 - 1, 3]))
        prompt = rng.choices(choices, k=rng.randint(1, 20))
        answer = rng.choices(choices, k=rng.randint(0, 30))
        if answers and rng.random() < 0.5:
            answer = answer[:3] + rng.choice(answers)[: rng.randint(1, 25)]
        sequence = sequence_of(prompt, answer)
        limit = rng.randint(1, 8)
        guesses = list(drafter.propose(sequence, limit))
        assert guesses == expected([*prompt, *answer], answers, limit)
        num_guessed += bool(guesses)
        num_past += guesses != expected([*prompt, *answer], [], limit)
        drafter.answers.add(sequence)
        if answer:
            answers.append([*prompt, *answer][max(0, len(prompt) - DEPTH) :])
    assert num_guessed > 100
    assert num_past > 30


def test_answers_never_draft_for_other_tenants_or_salts() -> None:
    drafter = SuffixDrafter(CONFIG)
    drafter.answers.add(sequence_of([1, 2, 3, 4], [5, 6, 7, 8], tenant="a", salt="b"))
    for tenant, salt in (("a", ""), ("", "b"), ("b", "a"), ("ab", ""), ("", "")):
        other = sequence_of([1, 2, 3, 4], tenant=tenant, salt=salt)
        assert list(drafter.propose(other, 4)) == []
    same = sequence_of([1, 2, 3, 4], tenant="a", salt="b")
    assert list(drafter.propose(same, 4)) == [5, 6, 7, 8]


def sizes_after(answers: PastAnswers, number: int, *, tenants: int = 1) -> int:
    """Add answers of 50 tokens that do not repeat; return the largest size on the way."""
    most = 0
    for index in range(number):
        first = 100 * index
        answers.add(sequence_of([first], range(first + 1, first + 51), tenant=str(index % tenants)))
        most = max(most, answers.num_bytes)
    return most


@pytest.mark.parametrize("tenants", [1, 3, 100])
def test_the_first_answers_are_dropped_beyond_the_limits(tenants: int) -> None:
    answers = PastAnswers(max_answers=20, context=4)
    sizes_after(answers, 100, tenants=tenants)
    assert len(answers) == 20
    limit = 60_000
    answers = PastAnswers(max_answers=1000, context=4, max_bytes=limit)
    most = sizes_after(answers, 300, tenants=tenants)
    assert most <= limit
    assert answers.num_bytes > limit / 2
    # All sizes were counted.
    assert answers.num_bytes == sum(one.num_bytes for one in answers._answers.values())
    assert answers.num_bytes >= 4 * sum(number for _, number in answers._order)
    drafter = SuffixDrafter(CONFIG)
    drafter.answers = answers
    kept = [299 - place for place in range(len(answers))]
    for index in range(300):
        first = 100 * index
        sequence = sequence_of([first], range(first + 1, first + 10), tenant=str(index % tenants))
        wanted = list(range(first + 10, first + 18)) if index in kept else []
        assert list(drafter.propose(sequence, 8)) == wanted
    while len(answers):
        answers._drop_first()
    assert answers.num_bytes == 0


def test_no_answers_are_kept_if_the_limit_is_0() -> None:
    answers = PastAnswers(max_answers=0, context=4)
    assert sizes_after(answers, 3) == 0
    assert len(answers) == 0


def test_answers_of_a_scheduler_draft_for_the_same_request() -> None:
    speculator = Speculator(CONFIG)
    speculator.times = FreeDrafts()

    def num_steps(tenant: str) -> int:
        harness = Harness(max_model_len=60, speculator=speculator)
        harness.add([1, 2, 3, 4, 5], max_tokens=40, tenant=tenant)
        harness.drain()
        return len(harness.plans)

    assert speculator.stats().answer_bytes == 0
    first = num_steps("a")
    assert speculator.stats().answer_bytes >= 4 * 40
    assert num_steps("a") < first / 2
    assert num_steps("b") == pytest.approx(first, abs=3)


def test_answers_with_a_stop_string_are_kept_and_others_without_drafts_not() -> None:
    speculator = Speculator(CONFIG)
    harness = Harness(speculator=speculator)
    request_id = harness.add([1, 2, 3], max_tokens=20)
    harness.add([1, 2, 3], max_tokens=20)
    harness.step()
    harness.sequences[1].drafts = None
    harness.step()
    harness.finish(request_id, 0)
    harness.drain()
    assert speculator._answers is not None
    assert len(speculator._answers) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix_decoding_max_tree_depth": 1}, "max_tree_depth must be 2 or more, not 1"),
        ({"suffix_decoding_max_cached_requests": -1}, "cached_requests must be 0 or more, not -1"),
        ({"suffix_decoding_max_spec_factor": -0.5}, "max_spec_factor must be from 0 to 100, not -"),
        ({"suffix_decoding_min_token_prob": 1.5}, "min_token_prob must be from 0 to 1, not 1.5"),
        ({"suffix_decoding_min_token_prob": float("nan")}, "must be from 0 to 1, not nan"),
    ],
)
# Any: fields of any type
def test_wrong_configurations_are_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        SpeculationConfig(**{"method": "suffix", "num_speculative_tokens": 3, **fields})

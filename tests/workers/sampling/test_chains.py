"""Chains of drafts: the tokens are those of decodes one by one, whatever the drafts are."""

import random

import numpy as np
import pytest
import torch

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from tests.workers.devices import DEVICES
from tests.workers.sampling.sampler_rig import EVERYTHING, GREEDY, MIXED
from workers.sampler import Sampler
from workers.sampling.edits import Chains

VOCAB_SIZE = 20
NUM_TOKENS = 40
PROMPT = [1, 2, 3, 2]
WORDS = ((4,), (5, 6), (7, 7), (8, 9, 7), (6, 6, 6, 5))
REPEATING = SamplingParams(
    temperature=0.6, repetition_penalty=1.4, presence_penalty=0.2, frequency_penalty=0.1, logprobs=2
)
# Row 8 has bad words alone, row 9 has penalties too.
PARAMETERS = [*MIXED[:5], *MIXED[6:], GREEDY, SamplingParams(), REPEATING]
EVERY_ROW = range(len(PARAMETERS))


def make_sampler(device: str, *, max_score_bytes: int) -> Sampler:
    sampler = Sampler(
        max_num_rows=len(PARAMETERS),
        vocab_size=VOCAB_SIZE,
        device=torch.device(device),
        max_score_bytes=max_score_bytes,
    )
    for row, sampling in enumerate(PARAMETERS):
        sampler.start(
            SequenceStart(
                row,
                pack_token_ids(PROMPT),
                len(PROMPT),
                [],
                sampling,
                seed=row,
                index=0,
                eos_token_ids=(0,),
                bad_token_ids=WORDS if row >= len(PARAMETERS) - 3 else (),
            )
        )
    return sampler


def logits_at(row: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * row + position)
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    # Some tokens are likely everywhere, so that outputs repeat and words are begun.
    logits[4:8] += 1.5
    return logits


def plain_tokens(device: str) -> tuple[list[list[int]], list[list[object]]]:
    """Return the tokens of each row, and their log-probabilities, without drafts."""
    sampler = make_sampler(device, max_score_bytes=2**20)
    steps, logprobs = [], []
    for position in range(len(PROMPT), len(PROMPT) + NUM_TOKENS):
        logits = torch.stack([logits_at(row, position) for row in EVERY_ROW]).to(device)
        sampled = sampler.sample(logits, EVERY_ROW, [position] * len(EVERY_ROW))
        steps.append(sampled.token_ids.tolist())
        logprobs.append(sampled.logprobs)
    return [*map(list, zip(*steps, strict=True))], [*map(list, zip(*logprobs, strict=True))]


def draft_tokens(rng: random.Random, expected: list[int]) -> list[int]:
    """Return up to four drafts; most are right at first."""
    drafts = expected[: rng.randrange(5)]
    if drafts and rng.random() < 0.6:
        # The last token has no logit, as placeholders in prompts have none.
        drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB_SIZE + 1)
    return drafts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_score_bytes", [2**20, 3 * 4 * VOCAB_SIZE])
def test_tokens_of_chains_are_those_of_single_decodes(device: str, max_score_bytes: int) -> None:
    expected, expected_logprobs = plain_tokens(device)
    sampler = make_sampler(device, max_score_bytes=max_score_bytes)
    rng = random.Random(3)
    found: list[list[int]] = [[] for _ in EVERY_ROW]
    num_accepted = num_refused = 0
    while any(len(tokens) < NUM_TOKENS for tokens in found):
        rows = [row for row in EVERY_ROW if len(found[row]) < NUM_TOKENS and rng.random() < 0.7]
        chains = {row: draft_tokens(rng, expected[row][len(found[row]) :]) for row in rows}
        places = [
            (row, len(PROMPT) + len(found[row]) + depth, draft)
            for row, drafts in chains.items()
            for depth, draft in enumerate([-1, *drafts])
        ]
        if not places:
            continue
        sampled = sampler.sample(
            torch.stack([logits_at(row, position) for row, position, _ in places]).to(device),
            [row for row, *_ in places],
            [position for _, position, _ in places],
            draft_ids=np.array([draft for *_, draft in places]),
        )
        logprobs = sampled.logprobs
        sampled_ids = sampled.token_ids.tolist()
        for index, (row, position, draft) in enumerate(places):
            output = found[row]
            if draft >= 0 and (len(output) != position - len(PROMPT) or output[-1] != draft):
                num_refused += 1
                continue
            num_accepted += draft >= 0
            if logprobs:
                place = len(output)
                if place < NUM_TOKENS:
                    assert repr(logprobs[index]) == repr(expected_logprobs[row][place])
            output.append(sampled_ids[index])
    assert [tokens[:NUM_TOKENS] for tokens in found] == expected
    assert num_accepted > 100
    assert num_refused > 100


def test_accepted_tokens_end_behind_the_first_wrong_draft() -> None:
    # Chains of four, one, three and two rows; the last samples from logits that are not finite.
    drafts = [-1, 5, 6, 7, -1, -1, 8, 9, -1, 3]
    sampled = [5, 6, 0, 7, 4, 1, 9, 2, -1, 3]
    chains = Chains(np.array(drafts))
    assert chains.accepted(torch.tensor(sampled)).tolist() == [5, 6, 0, -1, 4, 1, -1, -1, -1, -1]
    contexts = chains.contexts()
    assert contexts[:4].tolist() == [[-1, -1, -1], [5, -1, -1], [5, 6, -1], [5, 6, 7]]
    assert contexts[7].tolist() == [8, 9, -1]
    part = chains.of(np.arange(4, 8))
    assert part.accepted(torch.tensor([4, 8, 9, 2])).tolist() == [4, 8, 9, 2]


def test_a_step_without_drafts_has_no_contexts() -> None:
    chains = Chains(np.array([-1, -1]))
    assert chains.contexts().shape == (2, 0)
    assert chains.accepted(torch.tensor([1, 2])).tolist() == [1, 2]
    assert EVERYTHING.has_penalty

"""The trained heads of examples/ draft well, and shared noise costs little acceptance."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from scripts.train_tiny_llama import encode
from tests.test_tiny_llama import HELD_OUT_TEXT
from tests.workers.draft_acceptance import (
    EXAMPLES,
    TARGET,
    Floats,
    Rejection,
    SharedNoise,
    held_out_prompts,
    load_target,
    num_accepted,
    probabilities,
)
from tests.workers.draft_reference import load_reference, states_and_logits

HEADS = [EXAMPLES / "tiny-llama-eagle3", EXAMPLES / "tiny-llama-mtp"]
TEMPERATURES = [0.7, 1.0]
RATIO = 0.93
"""Of the tokens of a step with rejection sampling."""


@cache
def target() -> PreTrainedModel:
    return load_target()


def shared_share(p: Floats, q: Floats) -> float:
    """Return how often both distributions have the same argmax with the same Gumbel noise.

    A token is the argmax of both with probability 1 / sum over y of max(p_y / p_x, q_y / q_x)
    (Daliri, Musco and Suresh, 2024).
    """
    is_drafted = q > 1e-12
    p_drafted, q_drafted = p[is_drafted], q[is_drafted]
    p_others = p[~is_drafted].sum()
    ratios = p_drafted / q_drafted
    order = ratios.argsort()
    # Of tokens with a higher ratio than x, p decides; of the others, q.
    p_sums = np.append(p_drafted[order][::-1].cumsum()[::-1], 0.0)[1:] + p_others
    q_sums = q_drafted[order].cumsum()
    p_x, q_x = p_drafted[order], q_drafted[order]
    return float((1.0 / (p_sums / p_x + q_sums / q_x)).sum())


def test_share_of_equal_draws_is_that_of_draws() -> None:
    rng = np.random.default_rng(4)
    p = rng.dirichlet(np.ones(9))
    q = np.append(rng.dirichlet(np.ones(7)), (0.0, 0.0))
    noise = rng.gumbel(size=(100_000, 9))
    with np.errstate(divide="ignore"):
        is_equal = (np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1)
    assert is_equal.mean() == pytest.approx(shared_share(p, q), abs=0.008)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_first_drafts_with_shared_noise_are_nearly_as_good(
    folder: Path, temperature: float
) -> None:
    tokens = encode(Tokenizer.from_file(str(TARGET / "tokenizer.json")), [HELD_OUT_TEXT]).tolist()
    states, logits = states_and_logits(target(), tokens)
    head = load_reference(folder, target())
    rows = head.first_states([one[:-1] for one in states])
    drafted = head.logits(head.run(logits.new_tensor(tokens[1:]).long(), rows))
    shares = [
        (shared_share(p, q), np.minimum(p, q).sum())
        for p, q in zip(
            probabilities(logits[1:], temperature), probabilities(drafted, temperature), strict=True
        )
    ]
    shared, rejection = np.mean(shares, axis=0)
    assert 0.3 < shared < rejection
    assert 1 + shared >= RATIO * (1 + rejection)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_chains_with_shared_noise_are_nearly_as_long(folder: Path, temperature: float) -> None:
    head = load_reference(folder, target())
    lengths = [
        np.mean(
            [
                count
                for seed, prompt in enumerate(held_out_prompts(24))
                for count in num_accepted(
                    target(),
                    head,
                    rule(temperature, seed),
                    prompt,
                    num_tokens=64,
                    num_drafts=4,
                )
            ]
        )
        for rule in (SharedNoise, Rejection)
    ]
    # Drafts that are wrong more often lose more.
    ratio = RATIO if folder.name == "tiny-llama-eagle3" else 0.9
    assert lengths[0] >= ratio * lengths[1]


@pytest.mark.parametrize("folder", HEADS, ids=lambda folder: folder.name)
def test_greedy_drafts_are_accepted(folder: Path) -> None:
    head = load_reference(folder, target())
    counts = [
        count
        for prompt in held_out_prompts(2)
        for count in num_accepted(
            target(), head, SharedNoise(0.0, 0), prompt, num_tokens=24, num_drafts=3
        )
    ]
    assert np.mean(counts) > 1.4

"""Steps in and out of inference mode, without rows, and the first ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.sampling.numpy_choice import NumpyChoice

if TYPE_CHECKING:
    from workers.sampler import Sampler
    from workers.sampling.arrays import IntArray
    from workers.sampling.choice import Draws

from tests.workers.sampling.sampler_rig import (
    EVERYTHING,
    VOCAB_SIZE,
    make_logits,
    make_sampler,
    make_start,
    run_alone,
    sample_one,
)


def test_inference_mode_may_come_and_go(sampler: Sampler) -> None:
    logits = make_logits(4)
    expected = run_alone(None, EVERYTHING, logits)
    tokens: list[int] = []
    for i, row in enumerate(logits):
        with torch.inference_mode(mode=i % 2 == 0):
            sampler.start(make_start(EVERYTHING, row=i, output=tokens, eos=(2,)))
        with torch.inference_mode(mode=i < 2):
            tokens.append(sample_one(sampler, row, row=i, position=3 + i))
    assert tokens == expected


def test_a_step_without_rows_samples_nothing(sampler: Sampler) -> None:
    sampled = sampler.sample(torch.zeros(0, VOCAB_SIZE), [], [])
    assert sampled.token_ids.tolist() == []
    assert sampled.logprobs == []


class RecordingChoice(NumpyChoice):
    """Remembers which ways of choosing were taken, and from which dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def greedy(self, scores: Tensor, indices: IntArray) -> Tensor:
        self.calls.append(("greedy", scores.dtype))
        return super().greedy(scores, indices)

    def unfiltered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        self.calls.append(("unfiltered", scores.dtype))
        return super().unfiltered(scores, indices, draws)

    def filtered(self, scores: Tensor, indices: IntArray, draws: Draws) -> Tensor:
        self.calls.append(("filtered", scores.dtype))
        return super().filtered(scores, indices, draws)


def test_warm_up_chooses_in_every_way_from_both_dtypes() -> None:
    choice = RecordingChoice()
    make_sampler(choice=choice).warm_up(torch.bfloat16)
    ways = ("greedy", "unfiltered", "filtered")
    dtypes = (torch.bfloat16, torch.float32)
    assert choice.calls == [(way, dtype) for dtype in dtypes for way in ways]

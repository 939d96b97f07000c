"""Steps in and out of inference mode, without rows, and the first ones."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from tests.workers.sampling.sampler_rig import (
    CPU,
    EVERYTHING,
    MIXED,
    VOCAB_SIZE,
    make_logits,
    make_sampler,
    make_start,
    run_alone,
    sample_one,
)
from workers.sampler import Sampler
from workers.sampling.choice import Draws, IntArray
from workers.sampling.edits import num_mask_bytes
from workers.sampling.numpy_choice import NumpyChoice


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


@pytest.mark.parametrize("num_rows_at_once", [1, 3, 8])
def test_rows_sampled_in_parts_get_what_they_get_at_once(num_rows_at_once: int) -> None:
    num_rows = len(MIXED)
    rows, logits = list(range(num_rows)), make_logits(num_rows)
    mask = bytes(num_mask_bytes(VOCAB_SIZE) - 1) + b"\xff"
    found = []
    for max_score_bytes in (2**26, 4 * VOCAB_SIZE * num_rows_at_once):
        choice = RecordingChoice()
        sampler = Sampler(
            max_num_rows=num_rows,
            vocab_size=VOCAB_SIZE,
            device=CPU,
            choice=choice,
            max_score_bytes=max_score_bytes,
        )
        for row, sampling in enumerate(MIXED):
            start = make_start(sampling, row=row, output=[row, 5])
            # Every third row samples under a mask.
            sampler.start(replace(start, mask_start=0 if row % 3 == 0 else None))
        masks = b"".join(
            (b"\xff" * (4 * index) + mask)[: num_mask_bytes(VOCAB_SIZE)] for index in (1, 2, 3)
        )
        sampled = [
            sampler.sample(logits.clone(), rows, [5] * num_rows, masks, released=[1]),
            # Penalties count the first tokens, and one row is no longer masked.
            sampler.sample(logits.clone(), rows, [6] * num_rows, masks[: 2 * len(masks) // 3]),
        ]
        found.append([(one.token_ids.tolist(), one.logprobs) for one in sampled])
        assert (len(choice.calls) > 8) == (max_score_bytes < 2**26 and num_rows_at_once < num_rows)
    assert found[0] == found[1]
    assert sum(report is not None for report in found[1][0][1]) == 2

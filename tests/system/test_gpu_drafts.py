"""Drafters draft as well on a GPU, by graphs and by single launches, as on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.speculation_rig import TINY_LLAMA, answers, open_llm, speculator_of

TRAINED_HEAD = TINY_LLAMA.parent / "tiny-llama-eagle3"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    ("drafter", "rates"),
    [
        (TRAINED_HEAD, {"greedy": 1.2, "temperature": 0.7}),
        # The model itself: seldom, the last bits of its logits differ.
        (TINY_LLAMA, {"greedy": 4.5, "temperature": 4.3}),
    ],
    ids=["head", "model"],
)
def test_drafter_drafts_well_on_a_gpu(
    drafter: Path, rates: dict[str, float], enforce_eager: bool
) -> None:
    # Any: options of any type
    options: dict[str, Any] = {"device": "cuda", "num_threads": None, "num_blocks": 2000}
    options["enforce_eager"] = enforce_eager
    with open_llm(speculates=True, head=drafter, **options) as llm:
        for kind, least in rates.items():
            before = speculator_of(llm).stats()
            for _ in range(3):
                answers(llm, [kind])
            after = speculator_of(llm).stats()
            num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
            assert num_accepted / (after.num_chains - before.num_chains) > least

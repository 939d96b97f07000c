"""Log-probabilities of prompts equal those of transformers, however a prompt is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from pagedray import LLM, Generation, SamplingParams

TINY_LLAMA = Path("examples/tiny-llama")
PROMPTS = [[(7 * place + seed) % 500 for place in range(size)] for seed, size in
           enumerate((2, 5, 40, 97, 61))]  # fmt: skip
NUM_LIKELIEST = 3


@pytest.fixture(scope="module")
def truth() -> list[torch.Tensor]:
    """The log-probabilities of all tokens after each position of each prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY_LLAMA, dtype=torch.float32)
    with torch.no_grad():
        return [
            model(torch.tensor([prompt])).logits[0].double().log_softmax(-1) for prompt in PROMPTS
        ]


def check(found: list[Generation], truth: list[torch.Tensor]) -> None:
    for generation, prompt, expected in zip(found, PROMPTS, truth, strict=True):
        assert generation.prompt_logprobs is not None
        first, *others = generation.prompt_logprobs
        assert first is None
        assert len(others) == len(prompt) - 1
        for token, entry, row in zip(prompt[1:], others, expected, strict=False):
            assert entry is not None
            own = entry[token]
            assert own.logprob == pytest.approx(row[token].item(), abs=2e-4)
            assert own.rank == 1 + int((row > row[token]).sum())
            likeliest = row.topk(NUM_LIKELIEST)
            listed = list(entry.items())[:NUM_LIKELIEST]
            assert [other for other, _ in listed] == likeliest.indices.tolist()
            logprobs = [one.logprob for _, one in listed]
            assert logprobs == pytest.approx(likeliest.values.tolist(), abs=2e-4)


def llm(**options: Any) -> LLM:  # Any: engine options
    given: dict[str, Any] = {
        "executor": "local",
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
    }
    return LLM(TINY_LLAMA, show_progress=False, **(given | options))


PARAMS = SamplingParams(temperature=0.0, prompt_logprobs=NUM_LIKELIEST)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        # So few blocks that sequences are preempted and computed again.
        {"num_blocks": 9, "block_size": 16, "max_model_len": 128, "preemption": "recompute"},
    ],
    ids=["whole", "chunks", "preempted"],
)
def test_they_equal_those_of_transformers(
    options: dict[str, Any], truth: list[torch.Tensor]
) -> None:
    params = msgspec.structs.replace(PARAMS, max_tokens=30)
    with llm(**options) as model:
        # A cached prefix must not leave out what was requested.
        model.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        for _ in range(2):
            check(model.generate(PROMPTS, params, use_tqdm=False), truth)
        plain = model.generate(PROMPTS, SamplingParams(max_tokens=1), use_tqdm=False)
        assert all(one.prompt_logprobs is None for one in plain)
        if "preemption" in options:
            assert model.stats().scheduler.num_recompute_preemptions > 0
        else:
            assert sum(one.num_cached_tokens for one in plain) > 0


def test_sequences_of_a_prompt_share_them(truth: list[torch.Tensor]) -> None:
    params = SamplingParams(n=3, max_tokens=2, seed=1, prompt_logprobs=NUM_LIKELIEST)
    with llm() as model:
        check(model.generate(PROMPTS, params, use_tqdm=False), truth)


def test_reported_tokens_do_not_change_them(truth: list[torch.Tensor]) -> None:
    params = msgspec.structs.replace(PARAMS, max_tokens=2, logprobs=1, logprob_token_ids=[3])
    with llm() as model:
        check(model.generate(PROMPTS, params, use_tqdm=False), truth)


@pytest.mark.slow
def test_ranks_that_share_the_vocabulary_agree(truth: list[torch.Tensor]) -> None:
    options = {"executor": "ray", "tensor_parallel_size": 2, "max_num_batched_tokens": 16}
    params = msgspec.structs.replace(PARAMS, max_tokens=3)
    with llm(**options, max_num_seqs=4) as model:
        check(model.generate(PROMPTS, params, use_tqdm=False), truth)

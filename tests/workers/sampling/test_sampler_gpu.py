"""The sampler on a GPU: the same tokens as on the CPU, and no waiting for the device."""

import math

import pytest
import torch

from pagedray.batch import SequenceStart, pack_token_ids
from pagedray.sampling_params import SamplingParams
from workers.sampler import Sampled, Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB_SIZE = 32_000
NUM_STEPS = 4
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=50),
    SamplingParams(top_k=2000, top_p=0.9),
    SamplingParams(top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.5),
    SamplingParams(presence_penalty=1.0, logit_bias={5: 6.0, 6: -6.0}),
    SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[8]),
]


def run(device: torch.device, kinds: list[SamplingParams], logits: torch.Tensor) -> list[Sampled]:
    """Return what `NUM_STEPS` steps sample; `logits` is `[NUM_STEPS, num_kinds, vocab_size]`."""
    sampler = Sampler(max_num_rows=len(kinds), vocab_size=VOCAB_SIZE, device=device)
    rows = list(range(len(kinds)))
    for row, sampling in enumerate(kinds):
        sampler.start(SequenceStart(row, pack_token_ids([1, 2, 3]), 3, [], sampling, row, 0, (2,)))
    logits = logits.to(device)
    return [sampler.sample(logits[i], rows, [3 + i] * len(rows)) for i in range(NUM_STEPS)]


def make_logits(num_kinds: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(NUM_STEPS, num_kinds, VOCAB_SIZE, generator=generator) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    logits = make_logits(len(KINDS), dtype)
    logits[2, ::2, 77] = math.nan
    logits[3, 1::2, 77] = math.inf
    expected = run(torch.device("cpu"), KINDS, logits.clone())
    sampled = run(torch.device("cuda"), KINDS, logits)
    for ours, theirs in zip(sampled, expected, strict=True):
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()


def test_logprobs_are_those_of_the_cpu() -> None:
    kinds = [SamplingParams(logprobs=5), SamplingParams(temperature=0.0, logprobs=0)]
    logits = make_logits(len(kinds), torch.bfloat16)
    expected = run(torch.device("cpu"), kinds, logits.clone())
    sampled = run(torch.device("cuda"), kinds, logits)
    for ours, theirs in zip(sampled, expected, strict=True):
        for our, their in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert our is not None
            assert their is not None
            assert our.token_ids == their.token_ids
            assert our.chosen == pytest.approx(their.chosen, abs=1e-5)
            assert our.logprobs == pytest.approx(their.logprobs, abs=1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS])
def test_no_step_waits_for_the_device(kinds: list[SamplingParams]) -> None:
    device = torch.device("cuda")
    logits = make_logits(len(kinds), torch.float32).to(device)
    run(device, kinds, logits.clone())
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(device, kinds, logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")

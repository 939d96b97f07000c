"""Greedy tokens of quantized checkpoints equal transformers' with what their weights stand for."""

import random
from pathlib import Path

import pytest
import torch

from pagedray import LLM, SamplingParams
from pagedray.weight_format import Int4Format
from tests.greedy import (
    LONGEST,
    NUM_TOKENS,
    Truth,
    check_all_at_once,
    check_logprobs,
    generated,
    local_llm,
)
from tests.small_models.checkpoints import VOCAB_SIZE, greedy_continuations, save_word_tokenizer
from tests.small_models.int4_tensors import Int4Tensors
from tests.small_models.quantized_checkpoints import save_fp8_blocks, save_replaced, save_wide

AWQ = Int4Format(packing="awq", group_size=32)


def save_awq(folder: Path, quantized: Path, exact: Path) -> None:
    section = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}

    def stored(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return Int4Tensors.rounded(weight, AWQ).stored(name)

    def dequantized(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": Int4Tensors.rounded(weight, AWQ).exact.float()}

    save_replaced(folder, quantized, stored, section)
    save_replaced(folder, exact, dequantized)


@pytest.fixture(scope="module", params=["awq", "fp8"])
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp(request.param)
    save_wide(folder / "plain")
    save_word_tokenizer(folder / "plain", VOCAB_SIZE)
    if request.param == "awq":
        save_awq(folder / "plain", folder / "quantized", folder / "exact")
    else:
        save_fp8_blocks(folder / "plain", folder / "quantized", folder / "exact", 32)
    generator = random.Random(request.param)
    prompts = [[generator.randrange(3, VOCAB_SIZE) for _ in range(n)] for n in (3, 17, 41, 64, 70)]
    pairs = greedy_continuations(folder / "exact", prompts, NUM_TOKENS)
    return Truth(
        folder=folder / "quantized",
        prompts=prompts,
        continuations=[tokens for tokens, _ in pairs],
        logprobs=[logprobs for _, logprobs in pairs],
    )


def test_chunks_prefix_hits_and_preemption_change_nothing(truth: Truth) -> None:
    check_all_at_once(local_llm, truth)


def test_the_method_may_be_named(truth: Truth) -> None:
    method = "awq_marlin" if "awq" in str(truth.folder) else "fp8"
    with local_llm(truth.folder, quantization=method, max_model_len=LONGEST) as llm:
        check_logprobs(llm, truth)


@pytest.mark.slow
def test_two_ranks_change_nothing(truth: Truth, ray_cluster: None) -> None:
    with LLM(
        truth.folder,
        tensor_parallel_size=2,
        device="cpu",
        num_threads=1,
        show_progress=False,
        max_model_len=LONGEST,
        max_num_batched_tokens=29,
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        check_logprobs(llm, truth)


def test_a_cache_in_fp8_changes_logprobs_by_its_rounding(truth: Truth) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=1)
    with local_llm(truth.folder, dtype="float32", kv_cache_dtype="fp8_e4m3") as llm:
        generations = llm.generate(truth.prompts, params, use_tqdm=False)
    for generation, expected in zip(generations, truth.logprobs, strict=True):
        (output,) = generation.outputs
        assert len(output.token_ids) == 4
        assert output.logprobs is not None
        first = output.logprobs[0][output.token_ids[0]].logprob
        assert first == pytest.approx(float(expected[0]), abs=0.5)

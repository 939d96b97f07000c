"""Models with recurrent layers on a GPU: log-probabilities, in graphs, after hits and swaps.

Kernels round differently from transformers on a CPU, so that log-probabilities are compared, and
not tokens.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedray import LLM, SamplingParams
from tests.engine.speculation_rig import OracleDrafter, speculator_of
from tests.greedy import NUM_TRIES, settled_stats
from tests.scheduling.drafting import FreeDrafts
from tests.small_models.checkpoints import VOCAB_SIZE, Case, greedy_continuations, save_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_TOKENS = 70
LENGTHS = (1, 63, 64, 65, 200, 300)
LONGEST = max(LENGTHS) + NUM_TOKENS + 2
TOLERANCE = 0.02
CASE = Case(
    name="qwen3_5-on-a-gpu",
    family="Qwen3_5",
    more={
        "max_position_embeddings": 1024,
        "num_hidden_layers": 4,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
)
Scored = list[tuple[list[int], list[float]]]
"""Generated tokens of each prompt, and their log-probabilities."""


@pytest.fixture(scope="module", params=["full_attention", "linear_attention"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that ends with a layer of this type."""
    first, last = sorted(("full_attention", "linear_attention"), key=request.param.__eq__)
    folder = tmp_path_factory.mktemp(last)
    save_checkpoint(replace(CASE, more=CASE.more | {"layer_types": [first, last] * 2}), folder)
    return folder


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts[-1][:100] = prompts[-2][:100]
    return prompts


def gpu_llm(folder: Path, **options: Any) -> LLM:  # Any: engine options of any type
    given: dict[str, Any] = {"max_model_len": LONGEST, "max_num_seqs": 8, "num_blocks": 800}
    given["executor"] = "local"
    return LLM(folder, device="cuda", show_progress=False, **given | options)


def decoded(llm: LLM, prompts: list[list[int]]) -> Scored:
    """Return what an engine generates."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    results = []
    for generation in llm.generate(prompts, params, use_tqdm=False):
        (output,) = generation.outputs
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = [found[token_id].logprob for token_id, found in pairs]
        results.append((list(output.token_ids), logprobs))
    return results


def check(folder: Path, prompts: list[list[int]], results: Scored) -> None:
    """Compare with the log-probabilities of the same tokens in a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    texts = [prompt + tokens for prompt, (tokens, _) in zip(prompts, results, strict=True)]
    with gpu_llm(folder, enable_prefix_cache=False) as llm:
        generations = llm.generate(texts, params, use_tqdm=False)
    for text, generation, (tokens, logprobs) in zip(texts, generations, results, strict=True):
        assert generation.prompt_logprobs is not None
        found = generation.prompt_logprobs[len(text) - len(tokens) :]
        pairs = zip(tokens, found, strict=True)
        expected = [one[token_id].logprob for token_id, one in pairs if one is not None]
        assert logprobs == pytest.approx(expected, rel=0, abs=TOLERANCE)


def test_prompts_have_the_logprobs_of_transformers(folder: Path, prompts: list[list[int]]) -> None:
    check(folder, prompts, greedy_continuations(folder, prompts, NUM_TOKENS))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_graph_tokens": 0}, {"enforce_eager": True}],
    ids=["graphs", "eager_prompts", "eager"],
)
def test_decodes_continue_what_prompts_begin(
    options: dict[str, Any], folder: Path, prompts: list[list[int]]
) -> None:
    # Batches of three are padded to the size of a graph, and sequences end at several steps.
    with gpu_llm(folder, max_num_seqs=3, **options) as llm:
        check(folder, prompts, decoded(llm, prompts))


@pytest.mark.parametrize("budget", [128, 2048])
def test_hits_and_chunks_change_nothing(
    budget: int, folder: Path, prompts: list[list[int]]
) -> None:
    with gpu_llm(folder, max_num_batched_tokens=budget) as llm:
        check(folder, prompts, decoded(llm, prompts))
        check(folder, prompts, decoded(llm, prompts))
        assert llm.stats().scheduler.num_hit_tokens >= 64


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_preemption_changes_nothing(
    preemption: str, folder: Path, prompts: list[list[int]]
) -> None:
    with gpu_llm(folder, preemption=preemption, num_cpu_blocks=800, num_blocks=80) as llm:
        for _ in range(NUM_TRIES):
            check(folder, prompts * 2, decoded(llm, prompts * 2))
            stats = settled_stats(llm)
            if getattr(stats, f"num_{preemption}_preemptions"):
                break
    assert getattr(stats, f"num_{preemption}_preemptions") > 0


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_accepted_drafts_advance_states_like_decodes(
    options: dict[str, Any], folder: Path, prompts: list[list[int]]
) -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}}
    with gpu_llm(folder, max_num_seqs=40, **drafts, **options) as llm:
        known = [
            prompt + tokens
            for prompt, (tokens, _) in zip(prompts, decoded(llm, prompts), strict=True)
        ]
        speculator = speculator_of(llm)
        speculator.times = FreeDrafts()
        speculator.drafter = OracleDrafter(known, wrong=0.2, vocab_size=VOCAB_SIZE)
        # All together, and alone.
        check(folder, prompts, decoded(llm, prompts))
        check(folder, prompts[-2:-1], decoded(llm, prompts[-2:-1]))
        assert llm.stats().scheduler.speculation.num_accepted_tokens > 200


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_states_on_two_ranks_change_nothing(
    folder: Path, prompts: list[list[int]], ray_cluster: None
) -> None:
    options = {"preemption": "swap", "num_cpu_blocks": 800, "num_blocks": 120}
    with gpu_llm(folder, executor="ray", tensor_parallel_size=2, **options) as llm:
        scored = [decoded(llm, prompts) for _ in range(2)]
        assert llm.stats().scheduler.num_hit_tokens >= 64
    for one in scored:
        check(folder, prompts, one)

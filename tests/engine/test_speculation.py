"""Completions with drafts are those without drafts, whatever the drafts and the parameters are."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import LlamaConfig

from cluster.scheduling.suffix_decoding import SuffixDrafter
from pagedray import LLM, SamplingParams
from tests.engine.speculation_rig import (
    CHATS,
    MASKED,
    PARAMETERS,
    PROMPTS,
    TINY_LLAMA,
    TINY_MTP,
    OracleDrafter,
    RandomDrafter,
    answers,
    counted_overlaps,
    ngrams,
    noted_chains,
    open_llm,
    sequences_of,
    speculator_of,
    suffixes,
    write_thinking_model,
)
from tests.scheduling.drafting import FreeDrafts
from tests.slow_params import some_slow
from tests.small_models.checkpoints import save_checkpoint, save_word_tokenizer
from tests.small_models.family_cases import HYBRID_CASES
from tests.workers.draft_reference import (
    random_draft_model,
    random_eagle3_folder,
    random_glm4_moe_folder,
    random_mimo_folder,
    random_qwen3_5_folder,
    whole_mtp_folder,
)
from workers.layers.linear_choice import PackedGemmLinear, linear_kernel_class

if TYPE_CHECKING:
    from pathlib import Path

    from cluster.engine.stats import EngineStats
    from cluster.scheduling.drafters import Drafter

NAMES = [*PARAMETERS, *CHATS]
TRAINED_HEAD = TINY_LLAMA.parent / "tiny-llama-eagle3"
# About 20 sequences share the blocks of three, so that some are preempted again and again.
TIGHT = {"block_size": 4, "num_blocks": 300, "max_model_len": 300, "max_num_batched_tokens": 64}
SMALL: dict[str, Any] = {  # Any: fields of any type
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 3072, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "eos_token_id": 0},
}
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "swap": {**TIGHT, "preemption": "swap", "num_cpu_blocks": 500},
    "recompute": {**TIGHT, "preemption": "recompute", "num_cpu_blocks": 0},
    "few free rows": {"max_num_seqs": 66, "enable_prefix_cache": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_thinking_model(tmp_path_factory.mktemp("models") / "thinking")


def drafters(expected: list[list[int]]) -> dict[str, Drafter]:
    return {
        "n-grams": ngrams(),
        "suffixes": suffixes(),
        "random": RandomDrafter(),
        "oracle": OracleDrafter(expected),
        "some wrong": OracleDrafter(expected, wrong=0.3),
    }


@cache
def plain_answers(engine: str, model: Path) -> tuple[list[list[Any]], EngineStats]:
    """Return the completions of an engine without drafts, and its statistics."""
    with open_llm(speculates=False, model=model, **ENGINES[engine]) as plain:
        return answers(plain, NAMES), plain._engine.stats()


def check_equal(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Check the completions of each kind of parameters and prompt."""
    names = [name for name in NAMES for _ in PROMPTS]
    for name, one, wanted in zip(names, found, expected, strict=True):
        assert one == wanted, name


def checked(llm: LLM, drafter: Drafter, expected: list[list[Any]]) -> int:
    """Check the completions with a drafter, and return the number of accepted drafts."""
    speculator = speculator_of(llm)
    speculator.drafter = drafter
    speculator._answers = drafter.answers if isinstance(drafter, SuffixDrafter) else None
    before = speculator.stats()
    check_equal(answers(llm, NAMES), expected)
    after = speculator.stats()
    assert after.num_draft_tokens > before.num_draft_tokens
    return after.num_accepted_tokens - before.num_accepted_tokens


def is_exact(dtype: str) -> bool:
    """Return whether the GEMM of this CPU rounds few rows as it rounds many."""
    kernel_class = linear_kernel_class(getattr(torch, dtype), torch.device("cpu"))
    return kernel_class is PackedGemmLinear


def skip_if_inexact(dtype: str) -> None:
    if not is_exact(dtype):
        pytest.skip("The GEMM of this CPU rounds few rows differently from many.")


SLOW_DTYPE = "float32" if is_exact("bfloat16") else "bfloat16"


@pytest.mark.skipif(
    not (is_exact("float32") and is_exact("bfloat16")),
    reason="The GEMM of this CPU rounds few rows differently from many.",
)
@pytest.mark.parametrize(
    "engine", some_slow(list(ENGINES), slow=[one for one in ENGINES if one != "swap"])
)
def test_completions_with_drafts_are_those_without(engine: str, model: Path) -> None:
    expected, plain_stats = plain_answers(engine, model)
    with open_llm(speculates=True, model=model, **ENGINES[engine]) as llm:
        num_accepted, num_oracle_steps = dict[str, int](), 0
        for name, drafter in drafters(sequences_of(expected)).items():
            first = llm._engine.stats().num_steps
            num_accepted[name] = checked(llm, drafter, expected)
            if name == "oracle":
                num_oracle_steps = llm._engine.stats().num_steps - first
        stats = llm._engine.stats()
    assert num_accepted["random"] < num_accepted["n-grams"] < num_accepted["oracle"]
    assert num_accepted["random"] < num_accepted["suffixes"] < num_accepted["oracle"]
    assert num_oracle_steps < plain_stats.num_steps
    scheduler = stats.scheduler
    preempted = {
        "swap": scheduler.num_swap_preemptions,
        "recompute": scheduler.num_recompute_preemptions,
    }
    assert preempted.get(engine, 1) > 0
    assert scheduler.num_free_blocks == scheduler.num_blocks


@pytest.mark.parametrize(
    "engine", some_slow(list(ENGINES), slow=[one for one in ENGINES if one != "swap"])
)
def test_completions_with_a_drafter_on_the_rank_are_those_without(
    engine: str, model: Path, tmp_path: Path
) -> None:
    skip_if_inexact(ENGINES[engine].get("dtype", "bfloat16"))
    expected, plain_stats = plain_answers(engine, model)
    # The layers of the draft model have other keys and values than those of its target.
    draft_model = random_draft_model(tmp_path / "drafter", LlamaConfig(**SMALL), TINY_LLAMA)
    for drafter, rate in ((TRAINED_HEAD, 0.1), (draft_model, 0.0)):
        options = dict(ENGINES[engine])
        if drafter == draft_model and "num_blocks" in options:
            # A block of each of five groups of layers.
            options["num_blocks"] *= 5
        with open_llm(speculates=True, model=model, head=drafter, **options) as llm:
            check_equal(answers(llm, NAMES), expected)
            stats = llm._engine.stats().scheduler
        assert stats.speculation.num_accepted_tokens > stats.speculation.num_draft_tokens * rate
        if engine not in ("swap", "recompute"):
            # Sequences that are preempted look up their tokens again.
            assert stats.num_hit_tokens == plain_stats.scheduler.num_hit_tokens
            assert stats.num_queried_tokens == plain_stats.scheduler.num_queried_tokens
        assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("kind", ["greedy", "temperature", "n"])
def test_all_drafts_of_the_model_itself_are_right(kind: str) -> None:
    with open_llm(speculates=False, dtype="float32", block_size=4) as plain:
        expected = answers(plain, [kind], max_tokens=30)
    with open_llm(speculates=True, head=TINY_LLAMA, dtype="float32", block_size=4) as llm:
        chains = noted_chains(llm)
        # The second time, prompts are cached.
        for _ in range(2):
            assert answers(llm, [kind], max_tokens=30) == expected
        assert llm._engine.stats().scheduler.num_hit_tokens > 0
    assert sum(num_accepted for _, num_accepted in chains) > 100
    for chain, num_accepted in chains:
        # Overlapped plans may have drafts behind the end of a sequence.
        is_end = chain.position + num_accepted + 2 >= len(chain.sequence.token_ids)
        assert num_accepted == len(chain.draft_ids) or is_end


def test_trained_head_drafts_better_than_a_random_head(tmp_path: Path) -> None:
    random_head = random_eagle3_folder(
        tmp_path / "head", TINY_LLAMA, layer_ids=(1, 2, 3), draft_vocab_size=1024
    )
    rates: dict[tuple[str, str], float] = {}
    for name, head in {"random": random_head, "trained": TRAINED_HEAD}.items():
        with open_llm(speculates=True, head=head, dtype="float32") as llm:
            for kind in ("greedy", "temperature"):
                before = speculator_of(llm).stats()
                answers(llm, [kind])
                after = speculator_of(llm).stats()
                num_accepted = after.num_accepted_tokens - before.num_accepted_tokens
                num_chains = after.num_chains - before.num_chains
                rates[name, kind] = num_accepted / num_chains
    assert rates["trained", "greedy"] > 1.2 > 0.1 > rates["random", "greedy"]
    assert rates["trained", "temperature"] > 0.7 > 0.1 > rates["random", "temperature"]


HYBRIDS = {case.name: case for case in HYBRID_CASES}


def write_hybrid(name: str, model: Path, folder: Path) -> Path:
    """Write a random model with recurrent layers, and the tokenizer of another model."""
    case, vocab_size = HYBRIDS[name], json.loads((model / "config.json").read_text())["vocab_size"]
    save_checkpoint(replace(case, more=case.more | {"vocab_size": vocab_size}), folder)
    for path in model.glob("*token*"):
        shutil.copy(path, folder)
    return folder


@pytest.mark.parametrize(
    "name",
    some_slow(
        ["lfm2-convolutions", "qwen3_5-delta-rules", "granite-hybrid", "nemotron-h", "falcon-h1"],
        slow=["qwen3_5-delta-rules", "granite-hybrid", "nemotron-h", "falcon-h1"],
    ),
)
@pytest.mark.parametrize("preemption", some_slow(["swap", "recompute"], slow=["recompute"]))
def test_completions_of_hybrids_with_drafts_are_those_without(
    name: str, preemption: str, model: Path, tmp_path: Path
) -> None:
    # A few sequences and their states fill the pool.
    given: dict[str, Any] = {"max_model_len": 400, "dtype": "float32", "preemption": preemption}
    given |= {"model": write_hybrid(name, model, tmp_path), "num_blocks": 300, "block_size": 4}
    with open_llm(speculates=False, **given) as plain:
        expected = answers(plain, NAMES[1::2])
    num_accepted = dict[str, int]()
    with open_llm(speculates=True, **given) as llm:
        speculator = speculator_of(llm)
        for drafts, drafter in drafters(sequences_of(expected)).items():
            if drafts in ("suffixes", "n-grams"):
                continue
            before = speculator.stats().num_accepted_tokens
            speculator.drafter = drafter
            check_near(answers(llm, NAMES[1::2]), expected)
            num_accepted[drafts] = speculator.stats().num_accepted_tokens - before
        stats = llm.stats().scheduler
    assert num_accepted["random"] < num_accepted["some wrong"] < num_accepted["oracle"]
    assert stats.num_free_blocks == stats.num_blocks
    assert getattr(stats, f"num_{preemption}_preemptions") > 0


def check_near(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Check tokens and texts, and log-probabilities, of which chunks may change the last bits."""
    names = [name for name in NAMES[1::2] for _ in PROMPTS]
    for name, one, wanted in zip(names, found, expected, strict=True):
        assert one[0] == wanted[0], name
        for output, other in zip(one[2], wanted[2], strict=True):
            assert replace(output, logprobs=None) == replace(other, logprobs=None), name
            for given, kept in zip(output.logprobs or (), other.logprobs or (), strict=True):
                logprobs = {token_id: entry.logprob for token_id, entry in given.items()}
                assert logprobs == pytest.approx(
                    {token_id: entry.logprob for token_id, entry in kept.items()}, abs=1e-4
                )


@pytest.mark.parametrize(
    "name", some_slow(["mimo", "glm4_moe", "qwen3_5"], slow=["glm4_moe", "qwen3_5"])
)
def test_mtp_layers_of_families_change_no_token(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    if name == "qwen3_5":
        types = ("linear_attention", "full_attention", "linear_attention")
        random_qwen3_5_folder(folder, types)
    else:
        {"mimo": random_mimo_folder, "glm4_moe": random_glm4_moe_folder}[name](folder)
    save_word_tokenizer(folder, 131)
    prompts = [{"prompt_token_ids": list(range(3, size))} for size in (40, 9, 60)]
    sampling = SamplingParams(temperature=0.4, seed=2, max_tokens=30, ignore_eos=True)
    found = []
    for speculates in (False, True):
        with open_llm(
            speculates=speculates, model=folder, method="mtp", num_blocks=64, max_model_len=128
        ) as llm:
            generated = llm.generate(prompts, sampling)
            stats = llm._engine.stats().scheduler
        found.append([one.outputs[0].token_ids for one in generated])
    assert found[0] == found[1]
    assert stats.speculation.num_draft_tokens > 0


UNMASKED = [name for name in PARAMETERS if name not in MASKED]


@pytest.mark.parametrize("dtype", some_slow(["float32", "bfloat16"], slow=[SLOW_DTYPE]))
def test_completions_of_overlapped_steps_are_those_of_single_steps(dtype: str) -> None:
    skip_if_inexact(dtype)
    with open_llm(speculates=False, dtype=dtype) as plain:
        expected = [answers(plain, names, max_tokens=50) for names in (UNMASKED, ["temperature"])]
    with (
        open_llm(speculates=True, head=TRAINED_HEAD, dtype=dtype) as llm,
        counted_overlaps(llm) as overlaps,
    ):
        found = [answers(llm, names, max_tokens=50) for names in (UNMASKED, ["temperature"])]
        stats = llm._engine.stats()
    assert found == expected
    assert overlaps["plans"] > stats.num_steps / 4
    assert overlaps["drafts"] > 500


class LongGaps(FreeDrafts):
    """Plans that wait for tokens take half as long again."""

    gap_s = 0.5


@pytest.mark.parametrize("dtype", some_slow(["float32", "bfloat16"], slow=[SLOW_DTYPE]))
def test_completions_with_drafts_behind_drafts_are_those_of_single_steps(dtype: str) -> None:
    skip_if_inexact(dtype)
    with open_llm(speculates=False, dtype=dtype) as plain:
        expected = answers(plain, UNMASKED, max_tokens=50)
    known = sequences_of(expected)
    for drafter in (OracleDrafter(known), OracleDrafter(known[::2]), ngrams()):
        with (
            open_llm(speculates=True, dtype=dtype) as llm,
            counted_overlaps(llm) as overlaps,
        ):
            speculator = speculator_of(llm)
            speculator.drafter, speculator.times = drafter, LongGaps()
            assert answers(llm, UNMASKED, max_tokens=50) == expected
        assert overlaps["drafts"] > 100
        assert overlaps["plans"] > 5


@pytest.mark.parametrize(
    "engine",
    some_slow(["bfloat16", "float32", "swap"], slow=["swap", SLOW_DTYPE]),
)
def test_completions_with_a_trained_mtp_layer_are_those_without(
    engine: str, tmp_path: Path
) -> None:
    skip_if_inexact(ENGINES[engine].get("dtype", "bfloat16"))
    names = ["greedy", "temperature", "top_k", "penalties", "bad words", "logprobs", "n"]
    whole = whole_mtp_folder(tmp_path / "model", TINY_MTP, TINY_LLAMA)
    with open_llm(speculates=False, **ENGINES[engine]) as plain:
        expected = answers(plain, names)
    with open_llm(speculates=True, model=whole, method="mtp", **ENGINES[engine]) as llm:
        with counted_overlaps(llm) as overlaps:
            found = answers(llm, names)
        stats = llm._engine.stats().scheduler
    assert found == expected
    assert engine == "swap" or overlaps["drafts"] > 200
    assert stats.speculation.num_accepted_tokens > stats.speculation.num_draft_tokens / 20
    assert stats.num_free_blocks == stats.num_blocks

"""Models with recurrent layers: greedy tokens equal transformers', whatever is cached or moved."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.scheduling.drafters import Drafter
from pagedray import LLM, Completion, SamplingParams
from tests.engine.speculation_rig import OracleDrafter, RandomDrafter, ngrams, speculator_of
from tests.greedy import NUM_TRIES, generated, local_llm, settled_stats
from tests.scheduling.drafting import FreeDrafts
from tests.slow_params import some_slow
from tests.small_models.checkpoints import VOCAB_SIZE, Case, greedy_continuations, save_checkpoint
from tests.small_models.family_cases import HYBRID_CASES
from tests.system.engines import kill_after_steps, open_group, serving_processes
from workers.models.families.registry import read_model_config
from workers.models.self_attention import attention_spec
from workers.parallel.group import SoloGroup

NUM_TOKENS = 70
BLOCK_SIZE = 16
GRID = 64
SHARED = 100
"""Tokens that the longest prompts have in common."""
LENGTHS = (1, 63, 64, 65, 130, 300, 300, 300)
LONGEST = max(LENGTHS) + NUM_TOKENS
OVERFLOWING = 2
"""A token that prompts do not have."""
SAMPLED = ("lfm2-convolutions", "qwen3_5-delta-rules")
"""These run each time; the others are slow tests."""
DRAFTS = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 6}}
"""Options of an engine that `speculates`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A checkpoint, prompts, and transformers' greedy continuations of them."""

    folder: Path
    prompts: list[list[int]]
    continuations: list[list[int]]
    logprobs: list[list[float]]
    state_blocks: int

    @property
    def long_prompts(self) -> list[list[int]]:
        """The prompts that have a prefix in common."""
        return self.prompts[-3:]


def cases(*sampled: str) -> pytest.MarkDecorator:
    """Return parameters of all cases, of which only some run each time."""
    params = [
        pytest.param(case, id=case.name, marks=[] if case.name in sampled else pytest.mark.slow)
        for case in HYBRID_CASES
    ]
    return pytest.mark.parametrize("truth", params, indirect=True)


@pytest.fixture(scope="module")
def truth(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    case: Case = request.param
    folder = tmp_path_factory.mktemp(case.name)
    save_checkpoint(case, folder)
    rng = random.Random(case.name)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    for prompt in prompts[-2:]:
        prompt[:SHARED] = prompts[-3][:SHARED]
    pairs = greedy_continuations(folder, prompts, NUM_TOKENS)
    spec = attention_spec(
        read_model_config(folder, dtype="float32"),
        SoloGroup(),
        block_size=BLOCK_SIZE,
        device=torch.device("cpu"),
    )
    return Truth(
        folder=folder,
        prompts=prompts,
        continuations=[tokens for tokens, _ in pairs],
        logprobs=[logprobs for _, logprobs in pairs],
        state_blocks=spec.state_blocks,
    )


def pool(truth: Truth, num_sequences: float, num_states: int) -> dict[str, Any]:
    """Return the options of a pool for so many of the longest sequences, and so many states."""
    # Any: engine options of any type.
    num_blocks = int(num_sequences * -(-LONGEST // BLOCK_SIZE))
    return {
        "block_size": BLOCK_SIZE,
        "max_model_len": LONGEST,
        "num_blocks": num_blocks + num_states * truth.state_blocks,
    }


def completions(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return generated(llm, prompts, NUM_TOKENS)


def speculates(llm: LLM, truth: Truth) -> None:
    """Let an engine with `DRAFTS` guess the continuations, many tokens of them wrong."""
    pairs = zip(truth.prompts, truth.continuations, strict=True)
    known = [prompt + continuation for prompt, continuation in pairs]
    guess_by(llm, OracleDrafter(known, wrong=0.3, vocab_size=VOCAB_SIZE))


def guess_by(llm: LLM, drafter: Drafter) -> None:
    speculator = speculator_of(llm)
    speculator.drafter = drafter
    speculator.times = FreeDrafts()


def num_accepted(llm: LLM) -> int:
    return llm.stats().scheduler.speculation.num_accepted_tokens


def hits(llm: LLM, prompt: list[int], num_tokens: int = 1) -> int:
    """Return how many tokens of a prompt come from the prefix cache."""
    before = llm.stats().scheduler.num_hit_tokens
    generated(llm, [prompt], num_tokens)
    return llm.stats().scheduler.num_hit_tokens - before


@cases(*SAMPLED)
@pytest.mark.parametrize("budget", some_slow([128, 64, 13], slow=[64, 13]))
def test_chunks_of_any_size_change_nothing(truth: Truth, budget: int) -> None:
    options = pool(truth, 8, 20)
    with local_llm(truth.folder, **options, max_num_batched_tokens=budget, max_num_seqs=6) as llm:
        assert completions(llm, truth.prompts) == truth.continuations
        # All prefixes are cached.
        assert completions(llm, truth.prompts) == truth.continuations


@cases(*SAMPLED)
def test_logprobs_equal_those_of_transformers(truth: Truth) -> None:
    with local_llm(truth.folder, **pool(truth, 8, 20), max_num_seqs=8) as llm:
        check_logprobs(llm, truth)


def check_logprobs(llm: LLM, truth: Truth) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    generations = llm.generate(truth.prompts, params, use_tqdm=False)
    for generation, expected in zip(generations, truth.logprobs, strict=True):
        (output,) = generation.outputs
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs = [found[token_id].logprob for token_id, found in pairs]
        # Where a head's result is nearly 0, its norm makes errors large.
        errors = sorted(abs(one - other) for one, other in zip(logprobs, expected, strict=True))
        assert errors[-4] < 1e-4
        assert errors[-1] < 2e-3


@cases(*SAMPLED)
def test_prefixes_are_found_at_states(truth: Truth) -> None:
    first, second, third = truth.long_prompts
    with local_llm(truth.folder, **pool(truth, 8, 20), max_num_seqs=4) as llm:
        assert hits(llm, first) == 0
        assert hits(llm, first) == (len(first) - 1) // GRID * GRID
        # The second prompt computes the common prefix and keeps its state.
        assert hits(llm, second) == 0
        assert hits(llm, third) == SHARED // GRID * GRID
        # The end of a sequence is kept, too.
        (continuation,) = generated(llm, [first], NUM_TOKENS)
        assert continuation == truth.continuations[-3]
        turn = first + continuation + [7, 8, 9]
        assert hits(llm, turn[: LONGEST - 1]) >= len(first) // 128 * 128
        salted = {"prompt_token_ids": first, "cache_salt": "other"}
        before = llm.stats().scheduler.num_hit_tokens
        llm.generate([salted], SamplingParams(max_tokens=1), use_tqdm=False)
        assert llm.stats().scheduler.num_hit_tokens == before
        assert completions(llm, truth.prompts) == truth.continuations


@cases(*SAMPLED)
def test_drafts_change_no_token_and_no_logprob(truth: Truth) -> None:
    known = [[*pair[0], *pair[1]] for pair in zip(truth.prompts, truth.continuations, strict=True)]
    drafters: dict[str, Drafter] = {
        "n-grams": ngrams(),
        "random": RandomDrafter(VOCAB_SIZE),
        "oracle": OracleDrafter(known),
        "some wrong": OracleDrafter(known, wrong=0.3, vocab_size=VOCAB_SIZE),
    }
    accepted = dict[str, int]()
    with local_llm(truth.folder, **pool(truth, 8, 20), max_num_seqs=56, **DRAFTS) as llm:
        for name, drafter in drafters.items():
            guess_by(llm, drafter)
            before = num_accepted(llm)
            check_logprobs(llm, truth)
            assert completions(llm, truth.prompts) == truth.continuations, name
            accepted[name] = num_accepted(llm) - before
    # Four of five tokens, of two runs.
    assert accepted["oracle"] > 1.6 * NUM_TOKENS * len(LENGTHS)
    assert accepted["random"] < accepted["some wrong"] < accepted["oracle"]


@cases(*SAMPLED)
@pytest.mark.parametrize("has_cache", some_slow([True, False], slow=[False]))
def test_drafts_change_no_sampled_token(truth: Truth, has_cache: bool) -> None:
    # Any: parameters of any type.
    random: dict[str, Any] = {"temperature": 0.8, "max_tokens": NUM_TOKENS, "logprobs": 0}
    params = [
        SamplingParams(**random, seed=1, n=2, ignore_eos=True),
        SamplingParams(**random, seed=2, frequency_penalty=0.3, repetition_penalty=1.1),
        SamplingParams(**random, seed=3, stop_token_ids=[9, 10, 11, 12], min_tokens=20),
    ]
    prompts = truth.prompts[:6]
    options = {**pool(truth, 16, 40), "max_num_seqs": 80, "enable_prefix_cache": has_cache}

    def sampled(llm: LLM) -> list[Completion]:
        generations = [llm.generate(prompts, one, use_tqdm=False) for one in params]
        return [output for some in generations for one in some for output in one.outputs]

    with local_llm(truth.folder, **options) as llm:
        expected = sampled(llm)
    sequences = [prompt for prompt in prompts for _ in range(2)] + prompts * 2
    known = [[*pair[0], *pair[1].token_ids] for pair in zip(sequences, expected, strict=True)]
    with local_llm(truth.folder, **options, **DRAFTS) as llm:
        guess_by(llm, OracleDrafter(known, wrong=0.3, vocab_size=VOCAB_SIZE))
        found = sampled(llm)
        assert num_accepted(llm) > 500
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.finish_reason == other.finish_reason
        assert logprobs_of(one) == pytest.approx(logprobs_of(other), rel=0, abs=1e-4)


def logprobs_of(output: Completion) -> list[float]:
    assert output.logprobs is not None
    pairs = zip(output.token_ids, output.logprobs, strict=True)
    return [found[token_id].logprob for token_id, found in pairs]


@cases(*SAMPLED)
def test_a_state_within_accepted_drafts_is_found(truth: Truth) -> None:
    place = LENGTHS.index(63)
    prompt, continuation = truth.prompts[place], truth.continuations[place]
    with local_llm(truth.folder, **pool(truth, 8, 20), max_num_seqs=9, **DRAFTS) as llm:
        guess_by(llm, OracleDrafter([prompt + continuation]))
        assert completions(llm, [prompt]) == [continuation]
        assert num_accepted(llm) > 50
        turn = [*prompt, *continuation, 7, 8, 9]
        assert hits(llm, turn) == 128
        (cached,) = generated(llm, [turn], 20)
        assert num_accepted(llm) < 80
    with local_llm(truth.folder, **pool(truth, 8, 20), enable_prefix_cache=False) as llm:
        assert [cached] == generated(llm, [turn], 20)


@cases(SAMPLED[0])
@pytest.mark.parametrize("has_drafts", [True, False])
def test_recomputation_changes_nothing(truth: Truth, has_drafts: bool) -> None:
    check_preemption(truth, "recompute", has_drafts=has_drafts)


@cases(SAMPLED[1])
@pytest.mark.parametrize("has_drafts", [True, False])
def test_swaps_change_nothing(truth: Truth, has_drafts: bool) -> None:
    check_preemption(truth, "swap", has_drafts=has_drafts)


def check_preemption(truth: Truth, preemption: str, *, has_drafts: bool) -> None:
    prompts, continuations = truth.prompts * 2, truth.continuations * 2
    with local_llm(
        truth.folder,
        **pool(truth, 1.5, 0),
        num_cpu_blocks=1000,
        max_num_seqs=12 if has_drafts else 6,
        preemption=preemption,
        **DRAFTS if has_drafts else {},
    ) as llm:
        if has_drafts:
            speculates(llm, truth)
        for _ in range(NUM_TRIES):
            assert completions(llm, prompts) == continuations
            stats = settled_stats(llm)
            if getattr(stats, f"num_{preemption}_preemptions"):
                break
    assert getattr(stats, f"num_{preemption}_preemptions") > 0
    assert (stats.speculation.num_accepted_tokens > 100) == has_drafts
    assert stats.num_free_blocks == stats.num_blocks


def check_other_tiers(
    open_llm: Callable[..., LLM], truth: Truth, **options: Any
) -> tuple[int, int]:
    """Check prompts whose prefixes were evicted; return how many tokens CPU and disk gave."""
    # Any: engine options of any type.
    given = {"max_num_seqs": 1, "preemption": "swap"}
    with open_llm(truth.folder, **pool(truth, 1, 2), **given, **options) as llm:
        for _ in range(3):
            assert completions(llm, truth.prompts) == truth.continuations
            stats = settled_stats(llm)
    return stats.num_cpu_hit_tokens, stats.num_read_blocks


@cases(SAMPLED[1])
def test_states_come_back_from_the_cpu(truth: Truth) -> None:
    num_cpu_tokens, _ = check_other_tiers(local_llm, truth, num_cpu_blocks=1000)
    assert num_cpu_tokens >= GRID


@cases(SAMPLED[0])
def test_states_come_back_from_the_disk(truth: Truth, tmp_path: Path) -> None:
    num_blocks = pool(truth, 1, 3)["num_blocks"]
    _, num_read = check_other_tiers(
        local_llm,
        truth,
        num_cpu_blocks=num_blocks,
        disk_cache_folder=str(tmp_path),
        disk_cache_bytes=2**26,
    )
    assert num_read > 0


@cases(SAMPLED[0])
def test_damaged_states_on_the_disk_are_computed_again(truth: Truth, tmp_path: Path) -> None:
    with local_llm(
        truth.folder,
        **pool(truth, 1, 2),
        max_num_seqs=1,
        preemption="swap",
        num_cpu_blocks=pool(truth, 1, 3)["num_blocks"],
        disk_cache_folder=str(tmp_path),
        disk_cache_bytes=2**26,
    ) as llm:
        assert completions(llm, truth.prompts) == truth.continuations
        (cache,) = descriptors_of(tmp_path)
        for _ in range(NUM_TRIES):
            # What is written or read while the file is damaged may stay as it is.
            size = os.fstat(cache).st_size
            os.pwrite(cache, bytes(size), 0)
            assert completions(llm, truth.prompts) == truth.continuations
            stats = settled_stats(llm)
            if stats.num_failed_reads:
                break
    assert stats.num_failed_reads > 0


def descriptors_of(folder: Path) -> list[int]:
    """Return the descriptors of this process for files in a folder, which have no names."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [int(link.name) for link in links if link.readlink().is_relative_to(folder)]


@cases(*SAMPLED)
def test_a_state_that_is_not_finite_ends_its_sequence_alone(truth: Truth, tmp_path: Path) -> None:
    folder = with_overflowing_token(truth.folder, tmp_path / "model")
    prompts = truth.prompts[-3:-1]
    bad = truth.prompts[-1][::-1]
    bad[150] = OVERFLOWING
    params = SamplingParams(temperature=0.0, max_tokens=9, logit_bias={OVERFLOWING: -100.0})
    with local_llm(folder, **pool(truth, 4, 12), num_cpu_blocks=1000, max_num_seqs=2) as llm:
        expected = [one.outputs[0] for one in llm.generate(prompts, params, use_tqdm=False)]
        assert {output.finish_reason for output in expected} == {"length"}
        for _ in range(2):
            before = llm.stats().scheduler.num_hit_tokens
            (generation,) = llm.generate([bad], params, use_tqdm=False)
            assert generation.outputs[0].finish_reason == "error"
            assert llm.stats().scheduler.num_hit_tokens == before
        assert llm.stats().scheduler.num_nonfinite_sequences == 2
        # Rows, and blocks that had states, are used again.
        for prompt, output in zip(prompts, expected, strict=True):
            for again in (prompt, [5, *prompt], prompt):
                (generation,) = llm.generate([again], params, use_tqdm=False)
                assert generation.outputs[0].finish_reason == "length"
            assert generation.outputs[0].token_ids == output.token_ids


def with_overflowing_token(folder: Path, target: Path) -> Path:
    """Write the checkpoint with a token that makes the first recurrent state infinite."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    first = min(name.partition("in_proj")[0] for name in tensors if "in_proj" in name)
    for name, tensor in tensors.items():
        # Up to this layer, only this token has the first element of the stream.
        if "embed" in name and tensor.dim() > 1:
            tensor[:, 0] = 0.0
            tensor[OVERFLOWING, 0] = 100.0
        elif "o_proj" in name or "down_proj" in name:
            tensor[..., 0, :] = 0.0
        elif name.startswith(f"{first}in_proj") and tensor.dim() > 1:
            tensor[:, 0] = 1e38
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@cases(*SAMPLED)
@pytest.mark.parametrize("has_cache", some_slow([True, False], slow=[False]))
def test_several_completions_of_a_prompt_are_those_of_single_requests(
    truth: Truth, has_cache: bool
) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=20, ignore_eos=True)
    with local_llm(
        truth.folder, **pool(truth, 8, 20), max_num_seqs=12, enable_prefix_cache=has_cache
    ) as llm:
        together = llm.generate(truth.prompts[:5], params, use_tqdm=False)
        alone = [llm.generate([one], params, use_tqdm=False)[0] for one in truth.prompts[:5]]
    for one, other in zip(together, alone, strict=True):
        tokens = [output.token_ids for output in one.outputs]
        assert tokens == [output.token_ids for output in other.outputs]
        assert len(set(tokens)) == 3


@cases()
@pytest.mark.parametrize(("num_ranks", "has_drafts"), [(1, False), (2, False), (2, True)])
def test_killed_ranks_change_nothing(
    truth: Truth, num_ranks: int, has_drafts: bool, ray_cluster: None
) -> None:
    with open_group(
        truth.folder,
        num_ranks=num_ranks,
        **pool(truth, 1, 3),
        num_cpu_blocks=1000,
        max_num_seqs=9 if has_drafts else 2,
        preemption="swap",
        **DRAFTS if has_drafts else {},
    ) as llm:
        if has_drafts:
            speculates(llm, truth)
        assert completions(llm, truth.prompts) == truth.continuations
        assert (num_accepted(llm) > 100) == has_drafts
        kill_after_steps(llm, 40, serving_processes()[-1:])
        assert completions(llm, truth.prompts) == truth.continuations
        assert llm.stats().replacements["death"] == 1
        assert llm.stats().scheduler.num_kept_hit_tokens > 0

"""Greedy tokens of an engine, and what transformers generates for the same prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.scheduling.stats import SchedulerStats
from pagedray import LLM, SamplingParams
from pagedray.layout import num_held_blocks
from tests.small_models.checkpoints import VOCAB_SIZE, Case, greedy_continuations, save_checkpoint
from workers.models.families.registry import read_model_config
from workers.models.self_attention import attention_spec
from workers.parallel.group import SoloGroup

NUM_TOKENS = 28
NUM_TRIES = 20
PROMPT_LENGTHS = (3, 17, 32, 41, 64, 70)
LONGEST = max(PROMPT_LENGTHS) + NUM_TOKENS
_FEW_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """A checkpoint, prompts, and transformers' greedy continuations of them."""

    folder: Path
    prompts: list[list[int]]
    continuations: list[list[int]]
    logprobs: list[list[float]]
    """The logprob of each token of the continuations."""


def local_llm(folder: Path, **options: Any) -> LLM:  # Any: engine options of any type
    """Return an engine in this process, on one thread of the CPU."""
    return LLM(
        folder, executor="local", device="cpu", num_threads=1, show_progress=False, **options
    )


def truth_of(case: Case, folder: Path) -> Truth:
    """Save the checkpoint of a case and return what transformers generates with it."""
    save_checkpoint(case, folder)
    generator = random.Random(case.name)
    prompts = [
        [generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS
    ]
    # Two prompts share a prefix of several blocks.
    prompts[5][:40] = prompts[4][:40]
    pairs = greedy_continuations(folder, prompts, NUM_TOKENS)
    return Truth(
        folder=folder,
        prompts=prompts,
        continuations=[tokens for tokens, _ in pairs],
        logprobs=[logprobs for _, logprobs in pairs],
    )


def generated(llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Return the engine's greedy continuation of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    generations = llm.generate(prompts, params, use_tqdm=False)
    return [list(generation.outputs[0].token_ids) for generation in generations]


def check_logprobs(llm: LLM, truth: Truth) -> None:
    """Check the logprobs of greedy continuations."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    generations = llm.generate(truth.prompts, params, use_tqdm=False)
    logprobs = []
    for generation in generations:
        (output,) = generation.outputs
        assert output.logprobs is not None
        pairs = zip(output.token_ids, output.logprobs, strict=True)
        logprobs.append([found[token_id].logprob for token_id, found in pairs])
    assert logprobs == [pytest.approx(expected, rel=0, abs=1e-4) for expected in truth.logprobs]


def checked_until_preempted(llm: LLM, truth: Truth, *counts: str) -> SchedulerStats:
    """Check runs until one of these counts is above 0, and return the statistics.

    Requests arrive while others run; on a busy machine they may arrive too late to compete.
    """
    prompts, continuations = truth.prompts, truth.continuations
    if windows_of(truth, 4) != (None,):
        # Once sequences are longer than their windows, they hold few more blocks.
        prompts = prompts[:1] * _FEW_TOKENS + prompts
        continuations = continuations[:1] * _FEW_TOKENS + continuations
    for _ in range(NUM_TRIES):
        assert generated(llm, prompts) == continuations
        stats = settled_stats(llm)
        if any(getattr(stats, count) for count in counts):
            return stats
    pytest.fail(f"None of {counts} in {NUM_TRIES} runs.")


def settled_stats(llm: LLM) -> SchedulerStats:
    """Return statistics once no copy between the pools is under way."""
    while True:
        stats = llm.stats().scheduler
        if not (stats.num_transit_blocks or stats.num_transit_cpu_blocks):
            return stats
        time.sleep(0.01)


def windows_of(truth: Truth, block_size: int) -> tuple[int | None, ...]:
    """Return the windows of the groups of layers of a model."""
    config = read_model_config(truth.folder, dtype="float32")
    spec = attention_spec(
        config,
        SoloGroup(),
        block_size=block_size,
        device=torch.device("cpu"),
        max_seq_len=LONGEST,
    )
    return spec.grouped().group_windows


def small_pool(
    truth: Truth, *, block_size: int, num_spare: int, num_spare_windowed: int = 1
) -> dict[str, Any]:  # Any: engine options of any type
    """Return the options of a pool that holds little more than the longest sequence.

    It has `num_spare` more blocks, or `num_spare_windowed` in each group of layers if some free
    the blocks behind a window; then steps are small, since long chunks hold more blocks.
    """
    options = {"block_size": block_size, "max_model_len": LONGEST}
    windows = windows_of(truth, block_size)
    if windows == (None,):
        return options | {"num_blocks": -(-LONGEST // block_size) + num_spare}
    num_blocks = num_held_blocks(
        LONGEST, windows=windows, block_size=block_size, step_tokens=_FEW_TOKENS
    )
    return options | {
        "num_blocks": num_blocks + num_spare_windowed * len(windows),
        "max_num_batched_tokens": _FEW_TOKENS,
        "max_num_seqs": _FEW_TOKENS,
    }


def check_tiny_pool(
    open_llm: Callable[..., LLM], truth: Truth, *, block_size: int, preemption: str
) -> None:
    """Check continuations with a pool that holds little more than the longest sequence."""
    with open_llm(
        truth.folder,
        **small_pool(truth, block_size=block_size, num_spare=3),
        num_cpu_blocks=256,
        preemption=preemption,
        enable_prefix_cache=False,
    ) as llm:
        widths = [window for window in windows_of(truth, block_size) if window is not None]
        if widths and min(widths) < 2 * block_size:
            # Sequences hold few more blocks than at their start.
            assert generated(llm, truth.prompts) == truth.continuations
        else:
            checked_until_preempted(llm, truth, f"num_{preemption}_preemptions")


def check_all_at_once(open_llm: Callable[..., LLM], truth: Truth) -> None:
    """Check continuations with chunks, prefix hits and both kinds of preemption."""
    limits = {"max_num_batched_tokens": 11, "max_num_seqs": 5}
    with open_llm(
        truth.folder,
        **limits | small_pool(truth, block_size=4, num_spare=5),
        num_cpu_blocks=9 * len(windows_of(truth, 4)),
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        stats = checked_until_preempted(
            llm, truth, "num_swap_preemptions", "num_recompute_preemptions"
        )
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_free_cpu_blocks == stats.num_cpu_blocks


def check_disk_prefixes(open_llm: Callable[..., LLM], truth: Truth, *, folder: Path) -> None:
    """Check continuations of prompts that were evicted to the disk and come back."""
    # Room for one sequence, and for another one in the CPU pool.
    options = small_pool(truth, block_size=4, num_spare=1, num_spare_windowed=9)
    with open_llm(
        truth.folder,
        **options | {"max_num_seqs": 1},
        num_cpu_blocks=options["num_blocks"],
        preemption="swap",
        disk_cache_folder=str(folder),
        disk_cache_bytes=2**26,
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        # What is written was read from the CPU pool by then.
        for _ in range(NUM_TRIES):
            assert generated(llm, truth.prompts) == truth.continuations
            stats = settled_stats(llm)
            if stats.num_read_blocks > 2:
                break
    assert stats.num_written_blocks > 2
    assert stats.num_read_blocks > 2
    assert stats.num_failed_writes == stats.num_failed_reads == 0


def check_cpu_prefixes(open_llm: Callable[..., LLM], truth: Truth, *, block_size: int) -> None:
    """Check continuations of prompts that were evicted to the CPU pool and come back."""
    windows = windows_of(truth, block_size)
    with open_llm(
        truth.folder,
        # Room for one sequence: the next one evicts its blocks.
        **small_pool(truth, block_size=block_size, num_spare=1) | {"max_num_seqs": 1},
        num_cpu_blocks=256 * len(windows),
        preemption="swap",
    ) as llm:
        assert generated(llm, truth.prompts) == truth.continuations
        before = llm.stats().scheduler
        assert generated(llm, truth.prompts) == truth.continuations
        after = llm.stats().scheduler
    assert before.num_saved_blocks > 0
    num_restored = after.num_restored_blocks - before.num_restored_blocks
    num_full = sum((len(prompt) - 1) // block_size for prompt in truth.prompts)
    # With windows, a hit needs few blocks.
    assert num_restored > (num_full // 2 if windows == (None,) else 2)

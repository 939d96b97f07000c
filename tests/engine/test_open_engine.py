"""Opening an engine: what started ends if the rest fails."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.open_engine import open_engine
from cluster.engine.vllm_options import engine_options
from pagedray.config import StepLimits
from pagedray.errors import StartupError
from tests.fakes import FakeExecutor, RecordingSink
from tests.system.server_process import TINY_LLAMA

if TYPE_CHECKING:
    from pathlib import Path

    from pagedray.config import CacheSize
    from pagedray.model_config import Task


class _ClosableExecutor(FakeExecutor):
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_ranks_end_if_the_engine_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, task: Task
) -> None:
    config = engine_config(TINY_LLAMA, EngineOptions(executor="local", device="cpu"))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, task=task))
    executor = _ClosableExecutor()

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("cluster.engine.open_engine.EngineLoop", fail)
    with pytest.raises(MemoryError):
        open_engine(
            config,
            RecordingSink(),
            lambda what, fraction: None,
            make_executor=lambda config, report_progress, placement: executor,
        )
    assert executor.is_closed


@pytest.mark.parametrize(("num_blocks", "remedy"), [(63, "--num-blocks"), (None, "--memory-frac")])
def test_pool_that_holds_no_context_is_rejected_with_the_numbers(
    num_blocks: int | None, remedy: str
) -> None:
    options = EngineOptions(executor="local", device="cpu", num_blocks=num_blocks)
    executor = _ClosableExecutor(num_blocks=63)
    words = "1024 tokens needs 64 KV blocks of 16 .* only 63; use --max-model-len 1008 .*"
    with pytest.raises(StartupError, match=words + remedy):
        open_engine(
            engine_config(TINY_LLAMA, options),
            RecordingSink(),
            lambda what, fraction: None,
            make_executor=lambda config, report_progress, placement: executor,
        )
    assert executor.is_closed


class _WindowGroups(_ClosableExecutor):
    """Ranks with two groups of layers that free the blocks behind their window."""

    @property
    def cache_size(self) -> CacheSize:
        return dataclasses.replace(super().cache_size, groups=(None, 32, 32))


def test_pool_that_holds_no_context_of_several_groups_is_rejected_with_the_numbers() -> None:
    options = EngineOptions(executor="local", device="cpu", max_num_batched_tokens=16)
    # Windows of 32 tokens and a step take 4 blocks each, since neither end is at a border.
    words = "1024 tokens needs 72 KV blocks of 16 .* only 71; use --max-model-len 1008 .*"
    with pytest.raises(StartupError, match=words):
        open_engine(
            engine_config(TINY_LLAMA, options),
            RecordingSink(),
            lambda what, fraction: None,
            make_executor=lambda config, report_progress, placement: _WindowGroups(num_blocks=71),
        )


class _LargeBlocks(_ClosableExecutor):
    """Ranks whose blocks take a mebibyte together."""

    @property
    def cache_size(self) -> CacheSize:
        return dataclasses.replace(super().cache_size, num_cpu_blocks=8, block_bytes=2**20)


@pytest.mark.parametrize(("num_bytes", "is_enough"), [(2**20 - 1, False), (2**20, True)])
def test_disk_that_holds_no_block_is_rejected(
    tmp_path: Path, num_bytes: int, *, is_enough: bool
) -> None:
    options = EngineOptions(
        executor="local",
        device="cpu",
        disk_cache_folder=str(tmp_path),
        disk_cache_bytes=num_bytes,
    )
    executor = _LargeBlocks()
    words = "at least the 1048576 bytes of one KV block on all ranks, not 1048575"
    with nullcontext() if is_enough else pytest.raises(StartupError, match=words):
        open_engine(
            engine_config(TINY_LLAMA, options),
            RecordingSink(),
            lambda what, fraction: None,
            make_executor=lambda config, report_progress, placement: executor,
        ).close()
    assert executor.is_closed


def test_swapping_without_cpu_blocks_is_rejected() -> None:
    options = EngineOptions(device="cpu", preemption="swap")
    assert engine_config(TINY_LLAMA, options)
    with pytest.raises(StartupError, match="preemption swap needs CPU blocks"):
        engine_config(TINY_LLAMA, dataclasses.replace(options, num_cpu_blocks=0))


def test_blocks_of_a_model_without_any_are_not_kept() -> None:
    options = EngineOptions(device="cpu", disk_cache_folder="/tmp", disk_cache_bytes=2**30)
    assert engine_config(TINY_LLAMA, options)
    with pytest.raises(StartupError, match="disk_cache_folder has no effect on tiny-llama"):
        engine_config(TINY_LLAMA, dataclasses.replace(options, task="embed"))


def test_pool_of_one_context_is_enough() -> None:
    options = EngineOptions(executor="local", device="cpu", max_model_len=1008)
    engine = open_engine(
        engine_config(TINY_LLAMA, options),
        RecordingSink(),
        lambda what, fraction: None,
        make_executor=lambda config, report_progress, placement: FakeExecutor(num_blocks=63),
    )
    engine.close()


_LARGE = StepLimits(max_num_seqs=1024, max_num_batched_tokens=8192)


class _LargeGpus(FakeExecutor):
    """Ranks that choose larger steps than the default."""

    @property
    def cache_size(self) -> CacheSize:
        return dataclasses.replace(super().cache_size, limits=_LARGE)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens"), [(None, None), (8, None), (None, 64), (8, 64)]
)
def test_ranks_choose_the_limits_of_steps_that_no_option_sets(
    max_num_seqs: int | None, max_num_batched_tokens: int | None
) -> None:
    options = EngineOptions(
        executor="local",
        device="cpu",
        max_model_len=128,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    engine = open_engine(
        engine_config(TINY_LLAMA, options),
        RecordingSink(),
        lambda what, fraction: None,
        make_executor=lambda config, report_progress, placement: _LargeGpus(),
    )
    scheduler = engine.stats().scheduler
    assert scheduler.max_num_seqs == (max_num_seqs or 1024)
    assert scheduler.max_num_batched_tokens == (max_num_batched_tokens or 8192)
    engine.close()


@pytest.mark.parametrize("name", ["max_num_seqs", "max_num_batched_tokens", "max_model_len"])
def test_drafts_that_fit_into_no_step_are_rejected_with_the_limit(name: str) -> None:
    given = {"executor": "local", "device": "cpu", name: 8}
    options = engine_options({**given, "speculative_config": {"num_speculative_tokens": 8}})
    config = engine_config(TINY_LLAMA, options)
    executor = _ClosableExecutor(num_blocks=100)
    with pytest.raises(StartupError, match=f"must be less than {name}, 8, not 8"):
        open_engine(
            config,
            RecordingSink(),
            lambda what, fraction: None,
            make_executor=lambda config, report_progress, placement: executor,
        )
    assert executor.is_closed

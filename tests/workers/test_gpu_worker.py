"""A rank that leaves its epoch: which ranks can join another one, and which cannot."""

import gc
import logging
import secrets
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import SequencePlan, StepPlan, WorkerFailure
from pagedray.config import CacheSize, EngineConfig
from pagedray.step_listener import StepListener
from tests.system.server_process import TINY_LLAMA
from workers.gpu_worker import GpuWorker
from workers.models.decoder import Decoder
from workers.runner.host_pool import HostPool
from workers.weights.load_weights import load_weights

OPTIONS = EngineOptions(device="cpu", num_threads=1, load_format="dummy")
CACHE = CacheSize(num_blocks=8, num_cpu_blocks=0, block_bytes=0)


@pytest.fixture
def _unfrozen_heap() -> None:
    """The objects of all tests of the process are frozen until a rank freezes them again."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _uncaptured_log() -> Iterator[None]:
    """A rank takes the log of its process."""
    packages = [logging.getLogger(name) for name in ("attention", "pagedray", "workers")]
    before = [(package, package.level, list(package.handlers)) for package in packages]
    yield
    for package, level, handlers in before:
        package.setLevel(level)
        package.handlers[:] = handlers


@pytest.fixture
def rank() -> GpuWorker:
    rank = GpuWorker(engine_config(TINY_LLAMA, OPTIONS))
    assert rank.load_rank(0, 0, CACHE) is None
    assert rank.join_group(rank.open_rendezvous("127.0.0.1"), "127.0.0.1") is None
    return rank


def test_rank_that_has_left_joins_again_with_its_weights(rank: GpuWorker) -> None:
    model = rank._rank.worker._model  # type: ignore[attr-defined]  # a decoder's
    assert rank.leave_epoch(60.0) is None
    assert rank.allocate_cache(8, 0)
    assert rank.join_group(rank.open_rendezvous("127.0.0.1"), "127.0.0.1") is None
    assert rank._rank.worker._model is model  # type: ignore[attr-defined]  # as above


def test_a_new_rank_waits_for_memory_that_is_being_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = GpuWorker(engine_config(TINY_LLAMA, OPTIONS))
    failures: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory")] * 2
    failures.append(RuntimeError("invalid argument"))

    def fail(*arguments: Any, **options: Any) -> HostPool:  # Any: those of any function
        raise failures.pop(0)

    monkeypatch.setattr("workers.memory_profile._POLL_S", 0.0)
    # The torch of a CPU does not have all that this calls.
    monkeypatch.setattr("workers.memory_profile.release_gpu_memory", lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr("workers.decoder_worker.make_host_pool", fail)
        message = rank.load_rank(0, 0, CACHE)
    assert message is not None
    assert message.startswith("Could not allocate a KV cache of 8 blocks")
    assert not failures
    assert rank.load_rank(0, 0, CACHE) is None


def test_a_new_rank_drops_what_a_failed_attempt_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = GpuWorker(engine_config(TINY_LLAMA, OPTIONS))
    allocated: list[weakref.ref[Decoder]] = []
    numbers_left: list[int] = []

    def fail_at_first(
        model: Decoder,
        config: EngineConfig,
        report: Any,  # Any: not called
    ) -> dict[str, str]:
        allocated.append(weakref.ref(model))
        if len(allocated) < 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load_weights(model, config, report)

    def release() -> None:
        # The torch of a CPU does not have all that releases memory.
        gc.collect()
        numbers_left.append(sum(one() is not None for one in allocated))

    monkeypatch.setattr("workers.memory_profile._POLL_S", 0.0)
    monkeypatch.setattr("workers.memory_profile.release_gpu_memory", release)
    monkeypatch.setattr("workers.decoder_worker.load_weights", fail_at_first)
    assert rank.load_rank(0, 0, CACHE) is None
    assert numbers_left == [0, 0, 0]


def test_a_new_rank_tries_again_even_if_its_first_attempt_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank = GpuWorker(engine_config(TINY_LLAMA, OPTIONS))
    now_s = 0.0
    num_attempts = 0

    def fail_late(
        model: Decoder,
        config: EngineConfig,
        report: Any,  # Any: not called
    ) -> dict[str, str]:
        nonlocal now_s, num_attempts
        num_attempts += 1
        now_s += 60.0
        if now_s < 100.0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load_weights(model, config, report)

    clock = SimpleNamespace(monotonic=lambda: now_s, sleep=lambda _: None)
    monkeypatch.setattr("workers.memory_profile.time", clock)
    # The torch of a CPU does not have all that this calls.
    monkeypatch.setattr("workers.memory_profile.release_gpu_memory", gc.collect)
    monkeypatch.setattr("workers.decoder_worker.load_weights", fail_late)
    assert rank.load_rank(0, 0, CACHE) is None
    assert num_attempts == 2


def test_rank_whose_device_has_failed_says_so(
    rank: GpuWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(rank._rank.worker, "end_epoch", fail)
    assert rank.leave_epoch(60.0) == (
        "Rank 0 cannot continue: CUDA error: an illegal memory access was encountered"
    )


def test_rank_that_is_busy_does_not_hold_up_the_others(rank: GpuWorker) -> None:
    is_over = threading.Event()
    rank._thread.submit(is_over.wait)
    assert rank.leave_epoch(0.2) == "Rank 0 did not leave its group within 0.2 s."
    is_over.set()


def test_rank_that_failed_by_itself_cannot_join_another_epoch(
    rank: GpuWorker, tmp_path: Path
) -> None:
    rank.take_log_lines()
    secret = secrets.token_bytes(32)
    with closing(StepListener(f"unix:{tmp_path / 'steps'}")) as listener:
        pool = ThreadPoolExecutor(1)
        serving = pool.submit(rank.serve_controller, listener.endpoint, secret)
        (channel,) = listener.accept(1, secret, timeout_s=60.0)
    # No batch has such a row.
    channel.send(StepPlan(0, [SequencePlan(10**6, 0, 1, is_sampled=True)]))
    failure = channel.receive(60.0)
    assert isinstance(failure, WorkerFailure)
    assert not failure.is_peer
    channel.close()
    with pytest.raises(IndexError):
        serving.result(60.0)
    pool.shutdown()
    problem = rank.leave_epoch(60.0)
    assert problem is not None
    assert problem.startswith("Rank 0 failed: ")


def test_a_rank_leaves_a_working_folder_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    GpuWorker(engine_config(TINY_LLAMA, OPTIONS))
    assert Path.cwd() == folder
    folder.rmdir()
    GpuWorker(engine_config(TINY_LLAMA, OPTIONS))
    assert Path.cwd() == Path("/")


def test_what_a_rank_logs_is_taken_once(rank: GpuWorker) -> None:
    lines = rank.take_log_lines()
    assert {line.level for line in lines} == {logging.INFO}
    assert all(line.text.startswith("Attention: ") for line in lines)
    assert rank.take_log_lines() == []


@pytest.mark.usefixtures("_unfrozen_heap")
def test_collections_do_not_go_through_imported_modules(rank: GpuWorker) -> None:
    assert gc.isenabled()
    assert not any(one is torch.__dict__ for one in gc.get_objects())
    assert gc.get_freeze_count() > 100_000

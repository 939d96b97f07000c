"""One rank: the attention providers it logs, and the memory it takes and releases."""

import gc
import logging
import os
import threading
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import BlockCopy, DiskReport, StepPlan
from pagedray.config import EngineConfig, StepLimits
from pagedray.errors import DeviceError, StartupError
from pagedray.machine import host_memory_bytes
from pagedray.node_memory import NodeMemory
from pagedray.rank_progress import PoolReport
from tests.fakes import wait_for
from tests.small_models.checkpoints import CASES, save_checkpoint
from tests.system.server_process import TINY_LLAMA
from workers.decoder_worker import DecoderWorker
from workers.models.decoder import Decoder
from workers.parallel.group import SoloGroup

_LIMITS = StepLimits(max_num_seqs=8)


@pytest.fixture
def worker() -> DecoderWorker:
    options = EngineOptions(device="cpu", num_threads=1, num_blocks=8, load_format="dummy")
    return DecoderWorker(engine_config(TINY_LLAMA, options), SoloGroup())


def test_worker_logs_its_providers_once(
    worker: DecoderWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="workers"):
        report = worker.allocate_cache(8, 0)
    lines = [line for line in caplog.messages if line.startswith("Attention:")]
    assert len(lines) == 3
    assert lines[0] == f"Attention: {report.attention}"
    assert " kernels compute prefill of " in lines[1]
    assert " kernels compute decode of " in lines[2]


def test_worker_reports_the_backend_that_was_chosen(worker: DecoderWorker) -> None:
    assert worker._config.attention_backend == "auto"
    report = worker.allocate_cache(8, 0)
    assert report.backend == "torch_sdpa"
    num_layers = worker._config.model.num_layers
    assert sum(report.providers["prefill"].values()) == num_layers


def test_a_cache_takes_no_memory_before_it_is_used(worker: DecoderWorker) -> None:
    num_blocks = 2**30 // worker._spec.block_bytes
    before = psutil.Process().memory_info().rss
    worker.allocate_cache(num_blocks, num_blocks)
    assert psutil.Process().memory_info().rss - before < 2**27
    cache = worker._runner._cache  # type: ignore[union-attr]  # never None here
    assert not cache.device_pool[:2].any()


@pytest.mark.parametrize(("num_ranks", "named"), [(1, "of 1 rank need"), (8, "of 8 ranks need")])
def test_pools_larger_than_the_memory_of_the_node_are_rejected(num_ranks: int, named: str) -> None:
    group = SoloGroup()
    group.num_neighbors = num_ranks
    options = EngineOptions(device="cpu", num_threads=1, num_blocks=8, load_format="dummy")
    config = engine_config(TINY_LLAMA, options)
    size = DecoderWorker(config, SoloGroup())._spec.block_bytes
    # Each rank's pool takes a little more than its part.
    num_blocks = int(host_memory_bytes() / size / num_ranks * 1.01)
    config = engine_config(TINY_LLAMA, replace(options, num_cpu_blocks=num_blocks))
    with pytest.raises(DeviceError, match=rf"The caches {named} .* GiB of host memory, but there"):
        DecoderWorker(config, group).available_cache(_LIMITS)
    group.num_neighbors = max(num_ranks - 1, 1)
    if num_ranks > 1:
        assert DecoderWorker(config, group).available_cache(_LIMITS).num_cpu_blocks == num_blocks


def test_closed_worker_holds_no_weights(worker: DecoderWorker) -> None:
    worker.allocate_cache(8, 0)
    # Not every model of the process: a thread of an earlier test may still hold one.
    (model,) = [weakref.ref(one) for one in gc.get_referents(vars(worker)) if type(one) is Decoder]
    worker.close()
    gc.collect()
    assert model() is None


def test_a_folder_for_blocks_is_needed_at_the_start_only(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    options = EngineOptions(
        device="cpu",
        num_threads=1,
        num_blocks=8,
        num_cpu_blocks=8,
        load_format="dummy",
        disk_cache_folder=str(folder),
        disk_cache_bytes=2**20,
    )
    worker = DecoderWorker(engine_config(TINY_LLAMA, options), SoloGroup())
    with pytest.raises(StartupError, match=r"Cannot create files in --disk-cache-.*/cache: No"):
        worker.available_cache(_LIMITS)
    folder.mkdir()
    worker.available_cache(_LIMITS)
    worker.allocate_cache(8, 8)
    worker.end_epoch()
    folder.rmdir()
    worker.allocate_cache(8, 8)
    worker.launch(StepPlan(0, [], disk_writes=[BlockCopy(0, 3)])).output()
    assert worker.disk_jobs is not None
    assert worker.disk_jobs.take_report() == DiskReport(0, is_read=False, failed=[3])
    assert not worker.disk_jobs.are_pending
    worker.close()


def make_kept_worker(memory: NodeMemory, **options: Any) -> DecoderWorker:  # Any: of any type
    """Return a worker whose CPU pool, of 8 blocks, outlives it."""
    common = EngineOptions(device="cpu", num_threads=1, num_blocks=8, load_format="dummy")
    worker = loaded_worker(engine_config(TINY_LLAMA, replace(common, **options)), memory)
    allocate_pools(worker)
    return worker


def loaded_worker(config: EngineConfig, memory: NodeMemory) -> DecoderWorker:
    worker = DecoderWorker(config, SoloGroup(), pool_address=memory.address)
    worker.load_weights(lambda done, total: None)
    return worker


def allocate_pools(worker: DecoderWorker) -> None:
    worker.allocate_cache(8, 8)
    if worker.host_pool is not None and worker.host_pool.mapped is not None:
        # As the controller knows of it.
        worker.host_pool.mapped.confirm()


def run_and_copy(worker: DecoderWorker, plan: StepPlan) -> None:
    """Run a step to the end of its copies."""
    pending = worker.launch(plan)
    pending.output()
    wait_for(lambda: pending.is_copied)


def host_blocks(worker: DecoderWorker) -> torch.Tensor:
    """Return the CPU pool of a worker."""
    assert worker.host_pool is not None
    return worker.host_pool.blocks


def test_a_cpu_pool_outlives_its_worker() -> None:
    with closing(NodeMemory("cpu-pool")) as memory:
        worker = make_kept_worker(memory)
        assert worker.pool_report == PoolReport(is_shared=True)
        host_blocks(worker)[3].fill_(2.0)
        worker.close()
        worker = make_kept_worker(memory)
        assert worker.pool_report == PoolReport(is_shared=True, is_kept=True)
        assert host_blocks(worker)[3].eq(2.0).all()
        # A survivor keeps it too.
        worker.end_epoch()
        worker.allocate_cache(8, 8)
        assert worker.pool_report == PoolReport(is_shared=True, is_kept=True)
        worker.close()
        worker = make_kept_worker(memory, load_seed=1)
        assert worker.pool_report == PoolReport(is_shared=True)
        assert not host_blocks(worker).any()
        worker.close()


def test_a_pool_is_of_the_weights_that_were_loaded(tmp_path: Path) -> None:
    save_checkpoint(CASES[0], tmp_path)
    config = engine_config(tmp_path, EngineOptions(device="cpu", num_threads=1))
    with closing(NodeMemory("cpu-pool")) as memory:
        worker = loaded_worker(config, memory)
        # They are replaced after they were read.
        os.utime(tmp_path / "model.safetensors", (1, 1))
        allocate_pools(worker)
        worker.close()
        worker = loaded_worker(config, memory)
        allocate_pools(worker)
        assert worker.pool_report == PoolReport(is_shared=True)
        worker.close()


def test_a_pool_whose_memory_is_gone_is_private(caplog: pytest.LogCaptureFixture) -> None:
    memory = NodeMemory("cpu-pool")
    memory.close()
    worker = make_kept_worker(memory)
    assert worker.pool_report == PoolReport()
    assert host_blocks(worker).shape[0] == 8
    assert [line for line in caplog.messages if "CPU pool" in line] == [
        "The CPU pool of rank 0 will not outlive it: the memory of its controller is not on this "
        "node."
    ]
    worker.end_epoch()
    worker.allocate_cache(8, 8)
    assert worker.pool_report == PoolReport(is_kept=True)
    worker.close()


def test_threads_of_an_allocation_end_before_the_next(tmp_path: Path) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name == "pagedray-disk"]

    before = threads()
    disk = {"disk_cache_folder": str(tmp_path), "disk_cache_bytes": 2**20}
    with closing(NodeMemory("cpu-pool")) as memory:
        worker = make_kept_worker(memory, **disk)
        allocated = threads()
        assert len(allocated) == len(before) + 2
        allocate_pools(worker)
        wait_for(lambda: threads() == allocated)
        worker.close()
    wait_for(lambda: threads() == before)


def test_ranks_choose_larger_steps_on_large_gpus_only(
    worker: DecoderWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = StepLimits(max_num_seqs=256, max_num_batched_tokens=2048)
    large = StepLimits(max_num_seqs=1024, max_num_batched_tokens=8192)
    assert worker.default_limits == small
    monkeypatch.setattr(worker, "_device", torch.device("cuda", 0))
    for num_bytes, limits in ((40 * 2**30, small), (79 * 2**30, large)):
        properties = SimpleNamespace(total_memory=num_bytes)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, it=properties: it)
        assert worker.default_limits == limits

"""One rank: the attention providers it logs, and the memory it takes and releases."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import psutil
import pytest

from cluster.engine.options import EngineOptions, engine_config
from pagedray.batch import BlockCopy, DiskReport, StepPlan
from pagedray.errors import DeviceError, StartupError
from tests.system.server_process import TINY_LLAMA
from workers.decoder_worker import DecoderWorker
from workers.memory_profile import host_memory_bytes
from workers.models.decoder import Decoder
from workers.parallel.group import SoloGroup
from workers.runner.kv_cache import block_bytes

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def worker() -> DecoderWorker:
    options = EngineOptions(device="cpu", num_threads=1, num_blocks=8, load_format="dummy")
    return DecoderWorker(engine_config(TINY_LLAMA, options), SoloGroup())


def test_worker_logs_its_providers_once(
    worker: DecoderWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="workers"):
        worker.allocate_cache(8, 0)
    lines = [line for line in caplog.messages if line.startswith("Attention:")]
    assert len(lines) == 2
    assert lines[0].startswith("Attention: torch kernels compute prefill of ")
    assert " kernels compute decode of " in lines[1]


def test_a_cache_takes_no_memory_before_it_is_used(worker: DecoderWorker) -> None:
    num_blocks = 2**30 // block_bytes(worker._spec)
    before = psutil.Process().memory_info().rss
    worker.allocate_cache(num_blocks, num_blocks)
    assert psutil.Process().memory_info().rss - before < 2**27
    cache = worker._runner._cache  # type: ignore[union-attr]  # never None here
    assert not cache.device_pool[:2].any()


@pytest.mark.parametrize(("num_ranks", "named"), [(1, "of 1 rank need"), (8, "of 8 ranks need")])
def test_pools_larger_than_the_memory_of_the_node_are_refused(num_ranks: int, named: str) -> None:
    group = SoloGroup()
    group.num_neighbors = num_ranks
    options = EngineOptions(device="cpu", num_threads=1, num_blocks=8, load_format="dummy")
    config = engine_config(TINY_LLAMA, options)
    size = block_bytes(DecoderWorker(config, SoloGroup())._spec)
    # Each rank's pool takes a little more than its part.
    num_blocks = int(host_memory_bytes() / size / num_ranks * 1.01)
    config = engine_config(TINY_LLAMA, replace(options, num_cpu_blocks=num_blocks))
    with pytest.raises(DeviceError, match=rf"The caches {named} .* GiB of host memory, but there"):
        DecoderWorker(config, group).available_cache()
    group.num_neighbors = max(num_ranks - 1, 1)
    if num_ranks > 1:
        assert DecoderWorker(config, group).available_cache().num_cpu_blocks == num_blocks


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
    with pytest.raises(StartupError, match=r"Cannot make files in --disk-cache-.*/cache: No"):
        worker.available_cache()
    folder.mkdir()
    worker.available_cache()
    worker.allocate_cache(8, 8)
    worker.end_epoch()
    folder.rmdir()
    worker.allocate_cache(8, 8)
    worker.launch(StepPlan(0, [], disk_writes=[BlockCopy(0, 3)])).output()
    assert worker.take_disk_report() == DiskReport(0, is_read=False, failed=[3])
    assert not worker.has_disk_jobs
    worker.close()

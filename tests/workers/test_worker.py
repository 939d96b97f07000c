"""One rank: the attention providers it logs, and the memory it takes and releases."""

from __future__ import annotations

import gc
import logging
import weakref

import psutil
import pytest

from cluster.engine.options import EngineOptions, engine_config
from tests.system.server_process import TINY_LLAMA
from workers.decoder_worker import DecoderWorker
from workers.models.decoder import Decoder
from workers.parallel.group import SoloGroup
from workers.runner.kv_cache import block_bytes


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


def test_closed_worker_holds_no_weights(worker: DecoderWorker) -> None:
    worker.allocate_cache(8, 0)
    # Not every model of the process: a thread of an earlier test may still hold one.
    (model,) = [weakref.ref(one) for one in gc.get_referents(vars(worker)) if type(one) is Decoder]
    worker.close()
    gc.collect()
    assert model() is None

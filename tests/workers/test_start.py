"""The start of a rank: imports, compiled kernels and its log."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import RankLogLine
from pagedray.config import EngineConfig, StepLimits
from tests.small_models.checkpoints import save_word_tokenizer
from tests.system.server_process import ROOT
from tests.workers.runner.graphs.test_piece_graphs import CONFIG, VOCAB_SIZE
from workers.decoder_worker import CompileMarker, DecoderWorker
from workers.parallel.group import SoloGroup
from workers.rank_lifecycle import RankLog
from workers.runner.step_graphs import StepGraphs

KEYS = """
import sys
from triton.runtime.jit import JITFunction
from attention.kernels.triton.kernel_launcher import fix_kernel_keys
fix_kernel_keys()
modules = [sys.modules[name] for name in sorted(sys.modules) if ".kernels.triton." in name]
kernels = [one for m in modules for one in vars(m).values() if isinstance(one, JITFunction)]
print(len(kernels), sum(kernel.hash is not None for kernel in kernels))
"""
IMPORTS = """
import sys
from contextlib import suppress
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.errors import DeviceError
from pagedray.rank_progress import ProgressWord
from workers.rank_lifecycle import RankLifecycle

options = EngineOptions(device="cuda", num_blocks=8)
rank = RankLifecycle(engine_config("examples/tiny-llama", options), ProgressWord())
# Without a device, its imports are all that it does.
with suppress(DeviceError):
    rank.load(0, 0, None, None)
print("attention.gpu.shared_kernels" in sys.modules, "flashinfer" in sys.modules)
rank.import_libraries()
print("flashinfer" in sys.modules)
"""
DECODE = "BatchDecodeWithPagedKVCacheWrapper = fast_decode_plan = None"
PREFILL = "BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithRaggedKVCacheWrapper = None"
PROGRAM = """
import logging
from workers.rank_lifecycle import capture_log

log = capture_log()
logger = logging.getLogger("workers.weights")
logger.debug("a detail")
logger.info("Loaded %d GB", 3)
try:
    raise OSError("no space left")
except OSError:
    logger.warning("Blocks are lost.", exc_info=True)
for line in log.take_lines():
    print(line.level, line.text.splitlines()[0], "|", line.text.splitlines()[-1])
"""


@pytest.mark.slow
def test_libraries_that_a_model_may_not_need_are_imported_by_spares(tmp_path: Path) -> None:
    library = tmp_path / "flashinfer"
    library.mkdir()
    for name, text in {"__init__": "", "decode": DECODE, "prefill": PREFILL}.items():
        (library / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "False", "True"]


def test_every_kernel_has_its_key_before_one_is_used() -> None:
    # Where Triton interprets kernels they have no keys.
    environment = {name: it for name, it in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", KEYS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    num_kernels, num_keys = map(int, done.stdout.split())
    assert num_kernels > 30
    assert num_keys == num_kernels


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    # No other test has compiled for these sizes.
    sizes = {"hidden_size": 768, "intermediate_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **sizes}))
    save_word_tokenizer(tmp_path, VOCAB_SIZE)
    options = EngineOptions(
        device="cuda", executor="local", load_format="dummy", max_num_seqs=24, block_size=16
    )
    return engine_config(tmp_path, options)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_graphs_launch_is_compiled_before_they_are_captured(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    compiled: list[tuple[bool, str]] = []

    def note_compiled(*, fn: Any, is_manual_warmup: bool, **_: Any) -> None:  # Any: Triton's
        compiled.append((is_manual_warmup, fn.name))

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note_compiled)
    traced: list[StepGraphs[Any]] = []
    trace = StepGraphs.trace

    def note_traced(graphs: StepGraphs[Any]) -> None:  # Any: both kinds of captures
        traced.append(graphs)
        trace(graphs)

    monkeypatch.setattr(StepGraphs, "trace", note_traced)
    for start in range(2):
        worker = DecoderWorker(config, SoloGroup())
        worker.load_weights(lambda done, total: None)
        worker.available_cache(StepLimits(max_num_seqs=24))
        before = list(compiled)
        worker.allocate_cache(100, 0)
        worker.warm_up()
        worker.capture_graphs()
        worker.close()
        assert compiled == before
        if start == 0:
            assert sum(in_thread for in_thread, _ in compiled) > 10
        # Of decodes and of steps with prompts, in the first start alone.
        assert len(traced) == 2
    limited = config.with_limits(StepLimits(max_num_seqs=24))
    assert CompileMarker(limited, torch.device("cuda", 0)).exists


def test_lines_are_captured_and_warnings_are_written() -> None:
    # In another process, since a rank takes the log of its process.
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        f"{logging.INFO} Loaded 3 GB | Loaded 3 GB",
        f"{logging.WARNING} Blocks are lost. | OSError: no space left",
    ]
    assert done.stderr.startswith("Blocks are lost.\nTraceback")
    assert "Loaded" not in done.stderr


def test_the_oldest_of_too_many_lines_are_dropped() -> None:
    log = RankLog()
    for number in range(1500):
        log.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": str(number)}))
    lines = log.take_lines()
    assert (len(lines), lines[-1]) == (1000, RankLogLine(logging.INFO, "1499"))
    assert not log.has_lines

"""A start compiles the kernels of its graphs side by side, once for each configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.config import EngineConfig, StepLimits
from tests.small_models.checkpoints import save_word_tokenizer
from tests.workers.runner.graphs.test_piece_graphs import CONFIG, VOCAB_SIZE
from workers.decoder_worker import CompiledNote, DecoderWorker
from workers.parallel.group import SoloGroup
from workers.runner.step_graphs import StepGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


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
    assert CompiledNote(config, torch.device("cuda", 0)).exists

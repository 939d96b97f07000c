"""What the cache may take of a GPU beside steps and graphs, on a GPU that only counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.batch import StepPlan
from pagedray.rank_progress import ProgressWord
from tests.system.server_process import TINY_LLAMA
from workers.memory_profile import NO_GRAPHS, GraphSizes, MemoryProfile
from workers.runner.model_runner import ModelRunner

TOTAL = 1000
WEIGHTS = 200
STEPS = 50
SHARED_BY_GRAPHS = 100
EACH_GRAPH = 10


class CountingGpu:
    """Memory with the weights, and runners whose steps and graphs take some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_used = self.peak = WEIGHTS
        for name, function in {
            "mem_get_info": lambda device: (TOTAL - self.num_used, TOTAL),
            "memory_reserved": lambda device: self.num_used,
            "max_memory_reserved": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr("workers.memory_profile.release_gpu_memory", self.release)

    def release(self) -> None:
        self.num_used = WEIGHTS

    def make_runner(self, sizes: GraphSizes) -> ModelRunner:
        def launch(plan: StepPlan) -> SimpleNamespace:
            self.peak = max(self.peak, WEIGHTS + STEPS)
            return SimpleNamespace(take_masks=lambda masks: None, output=lambda: None)

        captured: set[int] = set()

        def capture_graphs(*, only_largest: bool = False) -> None:
            # Of one kind.
            every = sizes.decodes or sizes.pieces
            for size in {every[-1]} if only_largest else set(every):
                if size not in captured:
                    self.num_used += EACH_GRAPH if captured else SHARED_BY_GRAPHS
                    captured.add(size)

        forward_pass = SimpleNamespace(capture_graphs=capture_graphs)
        runner = SimpleNamespace(launch=launch, forward_pass=forward_pass)
        return cast("ModelRunner", runner)


@pytest.mark.parametrize(
    ("sizes", "graph_bytes"),
    [
        (NO_GRAPHS, 0),
        (GraphSizes([1], []), 100),
        (GraphSizes([1, 2, 4, 8, 16], []), 140),
        # Each kind is measured alone, so that the pool of both counts twice.
        (GraphSizes([1, 2, 4], [16, 32]), 120 + 110),
    ],
)
def test_steps_and_graphs_of_all_sizes_have_room_beside_the_cache(
    sizes: GraphSizes, graph_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = CountingGpu(monkeypatch)
    options = EngineOptions(device="cuda", executor="ray", memory_fraction=0.75)
    config = engine_config(TINY_LLAMA, options)
    profile = MemoryProfile(config, torch.device("cuda"), ProgressWord(), gpu.make_runner)
    assert profile.free_bytes(sizes) == TOTAL - 250 - WEIGHTS - STEPS - graph_bytes


def test_a_full_gpu_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CountingGpu(monkeypatch)
    options = EngineOptions(device="cuda", executor="ray", memory_fraction=0.1)
    config = engine_config(TINY_LLAMA, options)
    profile = MemoryProfile(config, torch.device("cuda"), ProgressWord(), gpu.make_runner)
    assert profile.free_bytes(NO_GRAPHS) == 0

"""Fused layers against the plain ones; two batches of a step, on two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.layer import Attention
from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray.model_config import Task
from tests.slow_params import some_slow
from tests.small_models.quantized_checkpoints import save_compressed, save_wide
from tests.workers.models.test_quantized_models import COMPRESSED
from tests.workers.models.two_ranks import on_two_ranks
from tests.workers.reference import (
    NUM_TOKENS,
    loaded_model,
    reference_logits,
    run,
    save_checkpoint,
    token_ids,
)
from tests.workers.reference_cases import CASES
from workers.embedding_worker import make_worker
from workers.layers.fused_kernels import AddNormedKernel
from workers.models import fused_layers, fused_norm
from workers.models.decoder import Decoder
from workers.models.self_attention import HeadInputs, SelectedAttention, StepAttention
from workers.parallel.group import ParallelGroup, SoloGroup
from workers.parallel.pending_sum import PendingSum
from workers.parallel.process_group import make_group

# Biases, norms of queries and keys, LayerNorm and a plain MLP, fused projections.
HALVED = ["llama-6-heads-2-kv-biases", "qwen3-biases-one-kv-head", "bloom-6-heads", "phi3-window"]
WHOLE = [
    *("cohere2-parallel", "gemma2-capped", "mixtral-window", "granite-multipliers"),
    *("gemma4-shared-embeddings", "gemma4-experts-keys-as-values"),
]


class Watch:
    """Counts the sums of a group, and how many are under way at most."""

    def __init__(self, begin: Callable[[torch.Tensor], PendingSum]) -> None:
        self._begin = begin
        self.num_rows: list[int] = []

    def __call__(self, rows: torch.Tensor) -> PendingSum:
        self.num_rows.append(len(rows))
        return self._begin(rows)


@pytest.fixture(autouse=True)
def few_tokens_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "_MIN_TOKENS", 2)
    monkeypatch.setattr(fused_layers, "_TILE_ROWS", 4)


def logits(folder: Path, group: ParallelGroup) -> tuple[torch.Tensor, list[int]]:
    """Return a rank's logits, and the rows of each sum that went on beside products."""
    group.overlaps_sums = True
    model = loaded_model(folder, group)
    watch = Watch(group.begin_all_reduce)
    group.begin_all_reduce = watch  # type: ignore[method-assign]
    return run(model, group), watch.num_rows


def compare(folder: Path, group: ParallelGroup) -> None:
    """Compare the logits of fused layers and of plain ones, for all tokens and for one."""
    fused = loaded_model(folder, group)
    plain = loaded_model(folder, group, fuses=False)
    # The norm of a recurrent layer makes small results large, and their rounding.
    tolerance = 3e-4 if fused.config.has_states else 2e-5
    for steps in ((NUM_TOKENS,), (NUM_TOKENS - 1, 1)):
        torch.testing.assert_close(
            run(fused, group, steps), run(plain, group, steps), rtol=tolerance, atol=tolerance
        )
    rows = torch.tensor([NUM_TOKENS - 1, 3])
    torch.testing.assert_close(
        run(fused, group, logits_indices=rows),
        run(plain, group, logits_indices=rows),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("name", some_slow(list(CASES), slow=list(CASES)[1::2]))
def test_fused_layers_compute_what_plain_layers_compute(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    compare(tmp_path, SoloGroup())


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets only without a GPU")
@pytest.mark.parametrize(
    "name", ["gemma2-capped", "gemma4-shared-embeddings", "gemma4-experts-keys-as-values"]
)
def test_the_kernel_that_norms_outputs_computes_what_plain_layers_compute(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("attention.kernels.triton.post_norm")
    launches: list[int] = []

    def made(weight: torch.Tensor, eps: float, *, overlaps: bool) -> AddNormedKernel:
        def launched(*arguments: Any, **options: Any) -> Any:  # Any: those of the kernel
            launches.append(1)
            return kernels.add_normed(
                *arguments, **options, norm=weight, eps=eps, overlaps=overlaps
            )

        return launched

    save_checkpoint(name, tmp_path)
    monkeypatch.setattr(fused_norm, "add_normed_kernel", made)
    compare(tmp_path, SoloGroup())
    assert launches


@pytest.mark.parametrize("name", [*HALVED, *WHOLE, "gemma2-capped", "olmo2-6-heads-2-kv"])
def test_fused_layers_of_two_ranks_compute_what_plain_layers_compute(
    name: str, tmp_path: Path
) -> None:
    save_checkpoint(name, tmp_path)

    def compared(group: ParallelGroup) -> None:
        group.overlaps_sums = True
        compare(tmp_path, group)

    on_two_ranks(compared)


@pytest.mark.parametrize("name", COMPRESSED)
def test_fused_layers_compute_what_plain_layers_compute_in_formats(
    name: str, tmp_path: Path
) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    save_wide(plain)
    save_compressed(plain, quantized, *COMPRESSED[name])
    compare(quantized, SoloGroup())


@pytest.mark.parametrize("name", HALVED)
def test_halves_compute_what_transformers_computes(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    expected = reference_logits(tmp_path)
    num_tokens = len(token_ids())
    for found, num_rows in on_two_ranks(lambda group: logits(tmp_path, group)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        first, second = num_rows[:2]
        assert first + second == num_tokens
        assert first % 4 == 0
        assert 0 <= first - second < 8
        # Two sums of each layer but the last, whose output is computed for all tokens at once.
        assert num_rows == [first, second] * (len(num_rows) // 2)
        assert len(num_rows) % 4 == 0


class Selecting(SelectedAttention):
    """Attends for all tokens, and returns the attention of some."""

    def __init__(self, attention: StepAttention, indices: torch.Tensor) -> None:
        super().__init__(indices)
        self._attention = attention

    def attend_selected(
        self,
        layer: Attention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        assert key is not None
        queries = query.new_zeros(len(key), *query.shape[1:]).index_copy_(0, self.indices, query)
        inputs = HeadInputs(torch.cat((queries, key), dim=1), value, None)
        return self._attention.attend(layer, inputs)[self.indices]


def test_the_last_layer_attends_for_some_tokens_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint("llama-6-heads-2-kv-biases", tmp_path)
    indices = torch.tensor([3, 22])
    forward = Decoder.forward

    def forward_selected(
        model: Decoder,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        logits_indices: torch.Tensor | None,
    ) -> torch.Tensor:
        last = Selecting(attention, indices)
        return forward(model, ids, positions, attention, logits_indices, last)

    monkeypatch.setattr(Decoder, "forward", forward_selected)

    def logits(group: ParallelGroup) -> torch.Tensor:
        group.overlaps_sums = True
        return run(loaded_model(tmp_path, group), group, logits_indices=indices)

    expected = reference_logits(tmp_path)[indices]
    for found in on_two_ranks(logits):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WHOLE)
def test_layers_that_halves_would_slow_down_run_whole(name: str, tmp_path: Path) -> None:
    save_checkpoint(name, tmp_path)
    expected = reference_logits(tmp_path)
    for found, num_rows in on_two_ranks(lambda group: logits(tmp_path, group)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert not num_rows


@pytest.mark.parametrize(("name", "has_sums"), [("fp8-channels", True), ("int4-symmetric", False)])
def test_weights_that_each_half_would_dequantize_run_whole(
    name: str, has_sums: bool, tmp_path: Path
) -> None:
    plain, quantized = tmp_path / "plain", tmp_path / "quantized"
    save_wide(plain)
    save_compressed(plain, quantized, *COMPRESSED[name])
    expected = run(loaded_model(quantized, SoloGroup()), SoloGroup())
    for found, num_rows in on_two_ranks(lambda group: logits(quantized, group)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert bool(num_rows) == has_sums


def test_steps_of_few_tokens_and_of_a_cpu_run_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(HALVED[0], tmp_path)

    def takes(group: ParallelGroup) -> tuple[bool, bool, bool]:
        model = loaded_model(tmp_path, group)
        fused = model.fused
        on_cpu = fused.overlaps(100)
        group.overlaps_sums = True
        return on_cpu, fused.overlaps(99), fused.overlaps(100)

    monkeypatch.setattr(fused_layers, "_MIN_TOKENS", 100)
    assert on_two_ranks(takes) == [(False, False, True)] * 2


@pytest.mark.parametrize(
    ("name", "task", "budget", "num_rows"),
    [
        (HALVED[0], None, 49, 0),
        (HALVED[0], None, 50, 28),
        # A text that is longer than the budget has a step of its own.
        (HALVED[0], "embed", 49, 32),
        (WHOLE[0], None, 50, 0),
        (WHOLE[0], "embed", 50, 0),
    ],
)
def test_only_ranks_that_may_run_halves_have_memory_for_their_sums(
    name: str,
    task: Task | None,
    budget: int,
    num_rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_checkpoint(name, tmp_path)
    monkeypatch.setattr(fused_layers, "_MIN_TOKENS", 50)
    options = EngineOptions(
        device="cpu",
        num_threads=1,
        tensor_parallel_size=2,
        task=task,
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        max_model_len=64,
    )
    group = make_group(0, 2, device=torch.device("cpu"))
    group.overlaps_sums = True
    make_worker(engine_config(tmp_path, options), group)
    assert group.max_begun_rows == num_rows

"""Keys and values that are computed again on a CPU have the same bits."""

from __future__ import annotations

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from cluster.engine.local_executor import LocalExecutor
from pagedray.batch import SequencePlan, SequenceStart, StepPlan, pack_token_ids
from pagedray.sampling_params import SamplingParams
from tests.system.server_process import TINY_LLAMA
from workers.decoder_worker import DecoderWorker
from workers.layers.linear_choice import PackedGemmLinear, linear_kernel_class

PROMPT = [3 + 7 * n for n in range(37)]
NUM_DECODES = 40
NUM_BLOCKS = 10
BLOCKS = list(range(NUM_BLOCKS))


def start(row: int, token_ids: list[int], blocks: list[int]) -> SequenceStart:
    params = SamplingParams(temperature=1.0)
    return SequenceStart(row, pack_token_ids(token_ids), len(PROMPT), blocks, params, 5, 0)


def generate(executor: LocalExecutor) -> list[int]:
    """Generate tokens one at a time beside another sequence, and return all."""
    token_ids = list(PROMPT)
    position, num_tokens = 0, len(PROMPT)
    starts = [start(0, PROMPT, BLOCKS), start(1, PROMPT[:9], list(range(20, 30)))]
    for step in range(NUM_DECODES):
        beside = (
            [SequencePlan(1, 0, 9, True)] if step == 0 else [SequencePlan(1, 8 + step, 1, True)]
        )
        executor.submit_plan(
            StepPlan(step, [SequencePlan(0, position, num_tokens, True), *beside], starts)
        )
        token_ids.append(executor.collect_output().token_ids[0])
        position, num_tokens, starts = len(token_ids) - 1, 1, []
    return token_ids


def cache_of(executor: LocalExecutor) -> torch.Tensor:
    worker = executor._worker
    assert isinstance(worker, DecoderWorker)
    assert worker._runner is not None
    return worker._runner._cache.device_pool[BLOCKS].clone()


@pytest.mark.skipif(
    linear_kernel_class(torch.float32, torch.device("cpu")) is not PackedGemmLinear,
    reason="The GEMM of this CPU rounds few rows differently from many.",
)
@pytest.mark.parametrize("chunks", [(77,), (37, 40), (37, 1, 39), (50, 27)])
def test_generated_tokens_get_the_same_keys_and_values_again(chunks: tuple[int, ...]) -> None:
    options = EngineOptions(
        executor="local",
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_blocks=30,
        block_size=8,
    )
    executor = LocalExecutor(engine_config(TINY_LLAMA, options), lambda what, fraction: None)
    token_ids = generate(executor)
    expected = cache_of(executor)
    executor.restart_ranks()
    starts = [start(0, token_ids, BLOCKS)]
    # The last token is computed by the step that samples the next.
    known, position = len(token_ids) - 1, 0
    assert sum(chunks) == known + 1
    for step, length in enumerate(chunks):
        is_last = step == len(chunks) - 1
        executor.submit_plan(StepPlan(step, [SequencePlan(0, position, length, is_last)], starts))
        output = executor.collect_output()
        position, starts = position + length, []
    assert len(output.token_ids) == 1
    found = cache_of(executor)
    executor.close()
    # [blocks, layers, 2, block_size, heads, size] to one flag for each position.
    same = (found == expected).transpose(1, 3).flatten(2).all(2).flatten()
    assert same[:known].all(), f"positions {(~same[:known]).nonzero().flatten().tolist()} differ"

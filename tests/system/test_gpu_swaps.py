"""Copies between the pools on a GPU: their order, their content, and the tokens beside them."""

import gc
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.abstract import AttentionParams, AttentionSpec
from attention.cpu.torch_sdpa import TorchSDPABackend
from cluster.scheduling.stats import SchedulerStats
from pagedray import LLM, SamplingParams
from pagedray.batch import BlockCopy, StepPlan
from pagedray.node_memory import NodeMemory
from pagedray.rank_progress import PoolReport, ProgressWord
from tests.greedy import generated, settled_stats
from tests.small_models.checkpoints import save_word_tokenizer
from workers.runner.input_batch import InputBatch
from workers.runner.kv_cache import KVCache, find_batched_copies, make_host_pool
from workers.runner.model_runner import ModelRunner
from workers.runner.pending_tokens import PendingTokens
from workers.runner.persistent_pool import MappedPool
from workers.runner.token_table import TokenTable
from workers.sampler import Sampler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BUSY_CYCLES = 400_000_000
"""A fifth of a second."""
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    # With fewer bits, tokens would depend on the batch.
    "torch_dtype": "float32",
}
NUM_REQUESTS = 24
NUM_NEW_TOKENS = 160
MAX_LEN = 1024


class Mapper:
    """Maps the memory of a CPU pool."""

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory

    def map_pool(
        self, num_blocks: int, block_shape: Sequence[int], dtype: torch.dtype, **_layout: object
    ) -> MappedPool:
        num_bytes = num_blocks * math.prod(block_shape) * dtype.itemsize
        return MappedPool(self._memory.address, num_bytes=num_bytes, origin=b"o" * 32)


class Rig:
    """Pools of 64 and 64 blocks of 1 MiB, and a runner for plans without sequences."""

    def __init__(self, *, num_staging: int, mapper: Mapper | None = None) -> None:
        device = torch.device("cuda")
        params = AttentionParams(num_heads=32, num_kv_heads=32, head_size=64, scale=0.125)
        spec = AttentionSpec(
            layers=(params,) * 4, dtype=torch.float32, device=device, block_size=16
        )
        pool = make_host_pool(spec, 64, mapper=mapper)  # type: ignore[arg-type]  # all it needs
        pool.start_pinning()
        pool.wait_until_pinned()
        assert pool.num_pinned_blocks == 64
        assert pool.blocks.is_pinned()
        self.cache = KVCache(
            TorchSDPABackend, spec, num_blocks=64, host_pool=pool, num_staging=num_staging
        )
        self.device = self.cache.device_pool
        self.host = pool.blocks
        nothing: Any = None  # Any: it is not called
        self.runner = ModelRunner(
            forward_pass=nothing,
            cache=self.cache,
            batch=InputBatch(
                TokenTable(max_num_rows=1, max_model_len=64, max_num_tokens=64, device=device),
                max_num_rows=1,
                max_model_len=64,
                block_size=16,
                replays_decodes=False,
            ),
            sampler=Sampler(max_num_rows=1, vocab_size=8, device=device),
            progress=ProgressWord(),
        )

    def keep_busy(self) -> None:
        """Have the copies to the host wait."""
        with self.runner._swaps._streams.outward.active():
            torch.cuda._sleep(BUSY_CYCLES)


def wait_for_copies(step: PendingTokens) -> None:
    while not step.is_copied:
        time.sleep(1e-4)


def copies_of(sources: list[int], targets: list[int]) -> list[BlockCopy]:
    return [BlockCopy(*pair) for pair in zip(sources, targets, strict=True)]


def test_the_driver_copies_many_blocks_at_once() -> None:
    # CUDA 12.8 or later, as torch needs it.
    assert find_batched_copies() is not None


def test_a_pool_that_outlives_its_rank_is_pinned_and_copied_from_by_the_next() -> None:
    with closing(NodeMemory("cpu-pool")) as memory:
        rig = Rig(num_staging=0, mapper=Mapper(memory))
        content = torch.randn_like(rig.device)
        rig.device.copy_(content)
        wait_for_copies(
            rig.runner.launch(StepPlan(0, [], swap_outs=copies_of([5, 6, 7, 1], [3, 4, 5, 63])))
        )
        assert rig.cache.host_pool.mapped is not None
        rig.cache.host_pool.mapped.confirm()
        del rig
        gc.collect()
        rig = Rig(num_staging=0, mapper=Mapper(memory))
        assert rig.cache.host_pool.take_report() == PoolReport(is_shared=True, is_kept=True)
        wait_for_copies(
            rig.runner.launch(StepPlan(0, [], swap_ins=copies_of([3, 4, 5, 63], [0, 9, 8, 2])))
        )
        assert torch.equal(rig.device[[0, 9, 8, 2]], content[[5, 6, 7, 1]])


def test_copies_begin_after_earlier_steps() -> None:
    rig = Rig(num_staging=0)
    content = torch.randn_like(rig.device)
    torch.cuda._sleep(BUSY_CYCLES)
    rig.device.copy_(content)
    step = rig.runner.launch(StepPlan(0, [], swap_outs=copies_of([5, 6, 7, 1], [3, 4, 5, 63])))
    assert not step.is_copied
    assert not rig.host.any()
    wait_for_copies(step)
    assert torch.equal(rig.host[[3, 4, 5, 63]], content[[5, 6, 7, 1]].cpu())
    assert rig.runner._swaps._pools._copier._batched is not None  # type: ignore[attr-defined]


def test_steps_wait_for_no_copies_but_those_of_evicted_blocks_that_are_not_staged() -> None:
    rig = Rig(num_staging=2)
    content = torch.randn_like(rig.device)
    rig.device.copy_(content)
    rig.keep_busy()
    first = rig.runner.launch(
        StepPlan(0, [], evictions=copies_of([0, 9], [1, 2]), swap_outs=copies_of([3], [4]))
    )
    # What comes next may overwrite them.
    rig.device[0].fill_(1.0)
    rig.device[9].fill_(1.0)
    output = first.output()
    assert not output.is_acknowledged
    assert output.num_swapped == 0
    assert not rig.host.any()
    second = rig.runner.launch(StepPlan(1, [], evictions=copies_of([10, 11], [6, 7])))
    rig.device[10:12].fill_(2.0)
    assert second.output().num_swapped in (3, 5)
    wait_for_copies(second)
    assert torch.equal(rig.host[[1, 2, 4, 6, 7]], content[[0, 9, 3, 10, 11]].cpu())
    assert bool((rig.device[[0, 9]] == 1.0).all())
    assert bool((rig.device[[10, 11]] == 2.0).all())


def test_random_copies_in_both_directions_keep_every_content() -> None:
    rig = Rig(num_staging=4)
    draws = random.Random(5)
    on_device = list(torch.randn_like(rig.device).cpu())
    rig.device.copy_(torch.stack(on_device))
    on_host = [torch.zeros_like(one) for one in on_device]
    for step in range(60):
        device, host = draws.sample(range(64), 48), draws.sample(range(64), 48)
        evictions = copies_of(device[:8], host[:8])
        swap_outs = copies_of(device[8:24], host[8:24])
        # The first four take the places of evicted blocks.
        swap_ins = copies_of(host[24:44], device[:4] + device[24:40])
        pending = rig.runner.launch(
            StepPlan(step, [], evictions=evictions, swap_outs=swap_outs, swap_ins=swap_ins)
        )
        rig.device[device[4:8]] = float(step)
        wait_for_copies(pending)
        for copy in evictions + swap_outs:
            on_host[copy.target] = on_device[copy.source]
        for copy in swap_ins:
            on_device[copy.target] = on_host[copy.source]
        for block in device[4:8]:
            on_device[block] = torch.full_like(on_device[block], float(step))
    torch.cuda.synchronize()
    assert torch.equal(rig.device.cpu(), torch.stack(on_device))
    assert torch.equal(rig.host, torch.stack(on_host))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swapped")
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_word_tokenizer(folder, 4096)
    return folder


def prompts_of(seed: int) -> list[list[int]]:
    """Return prompts, half of which have the same beginning."""
    draws = random.Random(seed)
    shared = [draws.randrange(4096) for _ in range(200)]
    prompts = []
    for number in range(NUM_REQUESTS):
        own = [draws.randrange(4096) for _ in range(draws.randint(50, 500))]
        prompts.append(shared + own if number % 2 else own)
    return prompts


class Differences:
    """Continuations that differ from those of a pool that is large enough."""

    def __init__(self) -> None:
        self._found: list[tuple[list[int], int, int]] = []
        """The tokens before the first difference, and the two that follow."""

    def compare(
        self, prompts: list[list[int]], expected: list[list[int]], found: list[list[int]]
    ) -> None:
        """Note each continuation that differs, and check that few do."""
        num_before = len(self._found)
        for prompt, one, other in zip(prompts, expected, found, strict=True):
            for index, (token, instead) in enumerate(zip(one, other, strict=True)):
                if token != instead:
                    self._found.append((prompt + one[:index], token, instead))
                    break
        assert len(self._found) - num_before <= 2

    def check_ties(self, open_large: Callable[[], LLM]) -> None:
        """Check that both tokens were likeliest up to rounding, which depends on the batch."""
        if not self._found:
            return
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2)
        with open_large() as llm:
            prompts = [prompt for prompt, _, _ in self._found]
            generations = llm.generate(prompts, params, use_tqdm=False)
        for (_, *tokens), generation in zip(self._found, generations, strict=True):
            logprobs = generation.outputs[0].logprobs
            assert logprobs is not None
            one, other = (logprobs[0][token].logprob for token in tokens)
            assert one == pytest.approx(other, rel=0, abs=1e-4)


def check_tokens(folder: Path, **options: Any) -> SchedulerStats:  # Any: engine options
    """Check that a pool that is too small gives the tokens of one that is not."""
    options = {
        "device": "cuda",
        "show_progress": False,
        "load_format": "dummy",
        "max_model_len": MAX_LEN,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        **options,
    }

    def open_large() -> LLM:
        large = {"num_blocks": 2000, "num_cpu_blocks": 0, "preemption": "auto"}
        return LLM(folder, **{**options, **large})

    prompts, differences = [prompts_of(seed) for seed in range(3)], Differences()
    # Each number of ranks sums in an order of its own.
    with open_large() as llm:
        expected = [generated(llm, one, NUM_NEW_TOKENS) for one in prompts]
        assert llm.stats().scheduler.num_swapped_out_blocks == 0
    # All requests need about 870 blocks.
    with LLM(folder, **{"num_blocks": 300, "num_cpu_blocks": 2500, **options}) as llm:
        for _ in range(2):
            for one, continuations in zip(prompts, expected, strict=True):
                differences.compare(one, continuations, generated(llm, one, NUM_NEW_TOKENS))
        stats = settled_stats(llm)
    assert stats.num_free_blocks == stats.num_blocks
    differences.check_ties(open_large)
    return stats


@pytest.mark.parametrize("enable_prefix_cache", [False, True])
def test_swapped_sequences_have_the_same_tokens(model: Path, *, enable_prefix_cache: bool) -> None:
    stats = check_tokens(
        model, executor="local", preemption="swap", enable_prefix_cache=enable_prefix_cache
    )
    assert stats.num_swapped_out_blocks > 100
    assert stats.num_swapped_in_blocks > 100


def test_prefixes_that_come_back_have_the_same_tokens(model: Path) -> None:
    stats = check_tokens(model, executor="local", preemption="auto")
    assert stats.num_saved_blocks > 100


@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_a_rank_of_its_own_gives_the_same_tokens(
    model: Path, ray_cluster: None, preemption: str
) -> None:
    stats = check_tokens(model, executor="ray", preemption=preemption)
    assert stats.num_saved_blocks + stats.num_swapped_out_blocks > 100


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("preemption", ["swap", "auto"])
def test_two_ranks_have_the_same_tokens(model: Path, ray_cluster: None, preemption: str) -> None:
    stats = check_tokens(model, executor="ray", tensor_parallel_size=2, preemption=preemption)
    assert stats.num_saved_blocks + stats.num_swapped_out_blocks > 100

"""Steps with prompts as CUDA graphs: the same results as eager steps, and nothing beside them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.engine.engine_options import EngineOptions, engine_config
from pagedray import LLM, SamplingParams
from pagedray.batch import SequencePlan, SequenceStart, StepOutput, StepPlan, pack_token_ids
from tests.small_models.checkpoints import save_word_tokenizer
from workers.decoder_worker import DecoderWorker
from workers.parallel.group import SoloGroup
from workers.runner.piece_graphs import piece_sizes

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB_SIZE = 1024
BLOCK_SIZE = 16
NUM_ROWS = 24
BLOCKS_PER_ROW = 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
WINDOWED = CONFIG | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "num_hidden_layers": 4,
    "use_sliding_window": True,
    "sliding_window": 70,
    "max_window_layers": 2,
}
"""Two groups of two layers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_config(CONFIG, tmp_path_factory.mktemp("llama"))


def save_config(config: dict[str, Any], path: Path) -> Path:  # Any: numbers, strings and lists
    (path / "config.json").write_text(json.dumps(config))
    save_word_tokenizer(path, VOCAB_SIZE)
    return path


@pytest.mark.parametrize("largest", [1, 16, 29, 1000, 1024, 1100, 2048, 8192])
def test_every_step_up_to_the_largest_has_a_size_that_pads_it_little(largest: int) -> None:
    sizes = piece_sizes(largest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == largest
    pairs = list(zip([0, *sizes], sizes, strict=False))
    assert all(size - below <= max(64, below / 8) for below, size in pairs)
    assert len(sizes) <= 60


def test_no_size_is_captured_for_zero_tokens() -> None:
    assert piece_sizes(0) == []


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "torch_sdpa"])
@pytest.mark.parametrize("config", [CONFIG, WINDOWED], ids=["uniform", "groups"])
def test_graphs_give_the_tokens_and_the_cache_of_eager_steps(
    config: dict[str, Any], tmp_path: Path, backend: str
) -> None:
    folder = save_config(config, tmp_path)
    eager, eager_pool = run_steps(folder, attention_backend=backend, max_graph_tokens=0)
    replayed, pool = run_steps(folder, attention_backend=backend)
    pairs = [
        (a, b)
        for one, other in zip(eager, replayed, strict=True)
        for a, b in zip(one.token_ids, other.token_ids, strict=True)
    ]
    # A padded step may use other kernels of cuBLAS: of tokens that nearly tie, any wins.
    assert sum(a == b for a, b in pairs) >= 0.85 * len(pairs) > 100
    # What a token leaves in the cache differs from that of another by about its own size.
    assert (pool - eager_pool).abs().max() < 0.1 * eager_pool.abs().max()
    # Block 0 belongs to no row.
    assert pool[1:].any(dim=(1, 2, 3, 4, 5)).all()
    assert not pool[0].any()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("num_next", [0, 7, 1000])
def test_graphs_captured_after_the_start_change_nothing(folder: Path, num_next: int) -> None:
    at_start, pool = run_steps(folder)
    # Those that are missing then are captured when a step needs them.
    lazily, lazy_pool = run_steps(folder, only_largest=True, num_next=num_next)
    assert [one.token_ids for one in lazily] == [one.token_ids for one in at_start]
    assert torch.equal(lazy_pool, pool)


@needs_gpu
@pytest.mark.gpu
@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_graphs_of_two_ranks_give_the_tokens_of_eager_steps(
    folder: Path, ray_cluster: None
) -> None:
    # Few rows are summed by our own kernel and many by NCCL.
    chance = random.Random(0)
    prompts = [
        [chance.randrange(2, VOCAB_SIZE) for _ in range(size)] for size in (700, 5, 90, 300, 40, 8)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    tokens = []
    for max_graph_tokens in (1024, 0):
        with LLM(
            folder,
            executor="ray",
            device="cuda",
            dtype="float32",
            load_format="dummy",
            tensor_parallel_size=2,
            max_num_batched_tokens=400,
            max_graph_tokens=max_graph_tokens,
            show_progress=False,
        ) as llm:
            one_by_one = [llm.generate([one], sampling, use_tqdm=False)[0] for one in prompts]
            together = llm.generate(prompts, sampling, use_tqdm=False)
        tokens.append([one.outputs[0].token_ids for one in (*one_by_one, *together)])
    assert tokens[0] == tokens[1]


def run_steps(
    folder: Path,
    *,
    only_largest: bool = False,
    num_next: int = 0,
    **options: Any,  # Any: engine options of any type
) -> tuple[list[StepOutput], torch.Tensor]:
    """Return the outputs of `mixed_plans` and the cache after them.

    With `only_largest`, up to `num_next` of the other graphs are captured before.
    """
    config = engine_config(
        folder,
        EngineOptions(
            device="cuda",
            executor="local",
            load_format="dummy",
            block_size=BLOCK_SIZE,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=1024,
            **options,
        ),
    )
    worker = DecoderWorker(config, SoloGroup())
    worker.load_weights(lambda done, total: None)
    num_groups = len(worker._spec.group_windows)
    worker.allocate_cache(1 + NUM_ROWS * BLOCKS_PER_ROW * num_groups, 0)
    worker.warm_up()
    worker.capture_graphs(only_largest=only_largest)
    num_captured = 0
    while num_captured < num_next and worker.use_idle_time():
        num_captured += 1
    assert worker.use_idle_time() == (only_largest and num_captured == num_next)
    outputs = [worker.launch(plan).output() for plan in mixed_plans(num_groups)]
    assert worker._runner is not None
    pool = worker._runner._cache.device_pool.float().cpu()
    worker.close()
    return outputs, pool


def mixed_plans(num_groups: int) -> list[StepPlan]:
    """Return steps of prompts, whole and in chunks, beside decodes, until all rows are full.

    Rows start again in each step, so that what was sampled is replaced by given tokens.
    """
    chance = random.Random(0)
    length, num_blocks = BLOCKS_PER_ROW * BLOCK_SIZE, BLOCKS_PER_ROW * num_groups
    tokens = [[chance.randrange(2, VOCAB_SIZE) for _ in range(length)] for _ in range(NUM_ROWS)]
    prompts = [chance.choice((1, 2, 15, 64, 200, length - 5)) for _ in range(NUM_ROWS)]
    computed = [0] * NUM_ROWS
    plans: list[StepPlan] = []
    while min(computed) < length:
        budget = chance.choice((20, 70, 300, 1000))
        sequences: list[SequencePlan] = []
        for row in chance.sample(range(NUM_ROWS), NUM_ROWS):
            first = computed[row]
            # Rows far behind catch up by large chunks, as preempted sequences do.
            wanted = prompts[row] - first if first < prompts[row] else chance.choice((1, 1, 1, 40))
            size = min(wanted, budget, length - first)
            if size > 0:
                is_sampled = first + size < length and chance.random() < 0.9
                sequences.append(SequencePlan(row, first, size, is_sampled=is_sampled))
                computed[row] += size
                budget -= size
        sequences.sort(key=lambda one: one.num_tokens == 1)
        starts = [
            SequenceStart(
                one.row,
                pack_token_ids(tokens[one.row]),
                prompts[one.row],
                list(range(1 + one.row * num_blocks, 1 + (one.row + 1) * num_blocks)),
                SamplingParams(temperature=0.0),
                one.row,
                0,
            )
            for one in sequences
        ]
        plans.append(StepPlan(len(plans), sequences, starts))
    return plans
